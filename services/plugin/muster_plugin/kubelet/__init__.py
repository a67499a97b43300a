"""Serves and registers one device plugin for each resource with the node's kubelet.

`resource_manager` runs a `resource_plugin` for each resource, and has it check its sockets whenever
`kubelet_socket` reports a change: after the kubelet has restarted, each resource registers again. A
`resource_plugin` executes the actions of the state machine `registration`, whose signals, actions
and states are in `registration_signals`. It has a `server` on its own socket and a `client` that
registers and probes the server. `allocation` decides the answer to Allocate, and `protobuf`
translates messages. `podresources` polls which pod holds which device, and compares the kubelet's
list with the advertised devices. `plugin_sockets` and `cdi` manage the files on the host.
"""
