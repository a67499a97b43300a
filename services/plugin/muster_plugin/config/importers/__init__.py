"""Converts the configuration of other device plugins to muster's.

`peer_file` reads a file, or the Kubernetes manifests that contain it, as the other plugin does;
`helm_values` reads the values of its chart. `device_nodes` converts files of smarter-device-manager
and generic-device-plugin. `nvidia`, with `nvidia_settings` and `iktos`, converts those of NVIDIA's
plugin, and `nvidia_nodes` converts several of them, selected by a node label.
"""
