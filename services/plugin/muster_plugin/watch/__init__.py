"""Watches the node's device plugins and drivers, except those that muster runs.

`node_model` evaluates each `observation`, with `sockets` (the process behind each socket, and when
to probe it), `backoff` (for plugins that end after a probe) and `finding` (the state machine of one
plugin). `naming` maps sockets to resources, `listings` tracks the kubelet's lists, and
`expectation` the expected counts. `checkpoint` decodes the kubelet's file, and `hardware` decides
which hardware a plugin should offer. `watcher` observes the node, with `socket_files`, `prober`,
`processes` and `node_files`. The package never registers a plugin, allocates devices or opens
ListAndWatch.
"""
