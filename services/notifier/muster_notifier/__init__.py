"""Tells people once, with evidence and what to do."""
