"""Runs a real single-node Kubernetes cluster on this machine, as root, without a container engine.

`layout` defines paths, addresses and versions. `tools` builds the programs from the Go modules in
tests/cluster/tools. `certificates` and `components` write their configuration. `node` runs them in
separate namespaces, which disappear when their first process ends. `images` builds the images of
pods.
"""
