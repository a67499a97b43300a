"""A container runtime plugin that adds /dev/fuse to containers that request it by annotation."""
