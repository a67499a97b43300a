"""Converts the configuration of other device plugins to ours.

`peer_file` reads a file, or the Kubernetes manifests that hold it, as the other plugin does;
`device_nodes` converts that of smarter-device-manager and generic-device-plugin, and `nvidia`, with
`nvidia_settings`, that of NVIDIA's plugin.
"""
