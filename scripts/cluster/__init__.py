"""A real Kubernetes of one node on this machine, as root, without a container engine.

`layout` names paths, addresses and versions; `tools` builds the programs from the Go modules in
tests/cluster/tools; `certificates` and `components` make what they are started with; `node` runs
them in namespaces of their own, so that nothing is left when the first process of these ends;
`images` builds what pods run.
"""
