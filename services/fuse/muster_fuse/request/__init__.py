"""Decides on pods' requests: what they ask for, who asks, and whether that is allowed."""
