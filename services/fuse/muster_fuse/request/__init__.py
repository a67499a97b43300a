"""Decides about requests of pods: what they ask for, who asks, and whether that is allowed."""
