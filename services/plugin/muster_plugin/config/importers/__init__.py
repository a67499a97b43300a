"""Converts the configuration of other device plugins to ours.

`peer_file` reads a file, or the Kubernetes manifests that hold it, as the other plugin does;
`smarter`, `generic` and `nvidia` convert it, the last with `nvidia_settings` and `nvidia_sharing`.
"""
