"""Converts the configuration of other device plugins to muster's.

`peer_file` reads a file, or the Kubernetes manifests that contain it, as the other plugin does.
`device_nodes` converts files of smarter-device-manager and generic-device-plugin; `nvidia`, with
`nvidia_settings`, those of NVIDIA's plugin.
"""
