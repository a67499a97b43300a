"""A container runtime plugin that adds /dev/fuse to the containers of pods that request it."""
