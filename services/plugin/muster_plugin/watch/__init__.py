"""Watches the device plugins and drivers on the node that muster does not run.

`node_model` decides what is wrong from each `observation`, with `sockets` (who serves them, when
they are probed) and `finding` (the state machine of one plugin). `naming` maps sockets to
resources, `listings` holds what the kubelet lists, `expectation` what it should list, `checkpoint`
is the kubelet's file, and `hardware` says what should be offered. `watcher` observes, with
`socket_files`, `prober`, `processes` and `node_files`. Nothing is registered, allocated or listed.
"""
