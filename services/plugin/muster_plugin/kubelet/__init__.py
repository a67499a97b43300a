"""Serves and registers one device plugin for each resource with the node's kubelet.

`resource_manager` runs a `resource_plugin` for each resource: it executes the actions of the state
machine `registration`, whose signals, actions and states are in `registration_model`, with a
`server` on its own socket, and a `client` that registers and probes it. `allocation` answers
Allocate, `protobuf` translates messages. `podresources` polls which pod holds what, and compares
that with what is advertised. `socket_directory` and `cdi` are the files on the host.
"""
