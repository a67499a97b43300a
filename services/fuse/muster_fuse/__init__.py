"""Mounts FUSE file systems for unprivileged pods that request no resource."""
