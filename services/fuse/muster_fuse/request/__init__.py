"""Decides on pods' requests: parses them, identifies the caller, and applies the rules."""
