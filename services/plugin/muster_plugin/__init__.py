"""The node's agent: serves devices to the kubelet and reports to the bus.

`__main__` is the process, `node` its wiring, `preflight` what is checked before it serves, `reload`
the settings while it runs, `bus_reporter` and `metrics` what it reports, `lean` how it stays small.
Packages, top to bottom: `cli`, `publishing`, `kubelet`, `inventory`, `gpu`, `discovery`, `config`,
`model`.
"""
