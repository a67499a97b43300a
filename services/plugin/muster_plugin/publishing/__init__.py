"""Pure: package."""
