"""Watches the device plugins and drivers on the node that muster does not run.

`node_model` decides from each `observation` what is wrong, with `sockets` (which process serves
them, when to probe them), `backoff` (for plugins that end after a probe) and `finding` (the state
machine of one plugin). `naming` maps sockets to resources, `listings` tracks what the kubelet
lists, `expectation` what it should list, `checkpoint` decodes the kubelet's file, and `hardware`
decides what should be offered. `watcher` observes, with `socket_files`, `prober`, `processes` and
`node_files`. It never registers, allocates or opens ListAndWatch.
"""
