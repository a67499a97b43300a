"""The node's agent: serves devices to the kubelet and reports to the bus.

`__main__` runs the process and `node` wires its parts together. `device_updates` records and
publishes changes, `foreign_plugins` starts `watch`, `bus_reporter` and `metrics` report to the bus
and to Prometheus, and `muster.service.lean` keeps the process small. Packages, each of which
imports only those after it: `cli`, `watch`, `kubelet`, `inventory`, `gpu`, `discovery`, `config`,
`model`.
"""
