"""Mounts FUSE file systems for unprivileged pods, without a resource request."""
