"""Converts the configuration of other device plugins to muster's.

`peer_file` reads a file, or the Kubernetes manifests that contain it, as the other plugin does;
`helm_values` the values of its chart. `device_nodes` converts files of smarter-device-manager and
generic-device-plugin; `nvidia`, with `nvidia_settings` and `iktos`, those of NVIDIA's plugin, and
`nvidia_nodes` several of these, one for each node.
"""
