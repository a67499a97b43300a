"""A container runtime plugin that gives containers /dev/fuse if an annotation asks for it."""
