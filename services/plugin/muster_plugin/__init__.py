"""The node's agent: serves devices to the kubelet and reports to the bus.

`__main__` is the process, `node` its wiring, `publisher` records and publishes changes,
`bus_reporter` and `metrics` are what it reports, `lean` is how it stays small. Packages, top to
bottom: `cli`, `kubelet`, `inventory`, `gpu`, `discovery`, `config`, `model`.
"""
