"""Finds plugins that failed silently, and says which way."""
