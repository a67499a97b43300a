"""A DRA driver that gives /dev/fuse to containers that request an extended resource."""
