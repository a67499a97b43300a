"""Watches the mounts of pods: which are in use, which hang, and which have lost their daemon."""
