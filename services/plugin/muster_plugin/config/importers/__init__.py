"""Converts the configuration of other device plugins to muster's.

`config.files` recognizes the file and calls the importer. `base` has what all importers
use: it reads values as the other plugin does, and searches the Kubernetes manifests that deploy it;
`helm_values` reads the values of its chart. `smarter_and_generic` converts files of
smarter-device-manager and generic-device-plugin. `nvidia`, with `nvidia_settings` and `iktos`,
converts those of NVIDIA's plugin, and `nvidia_nodes` converts several such files, each selected
by a node label.
"""
