"""Discovers the node's GPUs, names and shares them, and evaluates their health.

`evaluation` runs a source of observations (`nvml` or `simulated`), reads the policy and evaluates
the GPUs with `health_state`, which is built from `faults` and `xid_policy`. `naming` and `replicas`
plan the resources, `container_spec` is the answer to Allocate, `topology` finds GPUs that are well
connected.
"""
