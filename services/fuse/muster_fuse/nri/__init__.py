"""Gives containers /dev/fuse by an annotation of their pod: a plugin of the container runtime."""
