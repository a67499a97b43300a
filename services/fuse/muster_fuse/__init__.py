"""Mounts FUSE file systems for unprivileged pods, which need no resource request for this."""
