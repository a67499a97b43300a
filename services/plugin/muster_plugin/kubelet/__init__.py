"""Serves and registers one device plugin for each resource with the node's kubelet.

`resource_manager` runs a `resource_plugin` for each resource: it executes the actions of the state
machine `registration` (`registration_events`, `resource_status`) with a `server` on its own socket,
the `client` of the kubelet and a `self_probe`. `allocation` answers Allocate, `protobuf` translates
messages. `podresources` polls which pod holds what, `podresources_check` compares that with what is
advertised. `socket_directory`, `resource_locks` and `cdi` are the files on the host.
"""
