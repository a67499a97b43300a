"""Gives containers /dev/fuse for a request of an ordinary resource, by a DRA driver."""
