"""Discovers the node's GPUs, names and shares them, and evaluates their health.

`evaluation` runs a source of observations (`nvml` or `simulated`), reads the policy and evaluates
the GPUs with `gpu_health`, which is built from `faults` and `xid_policy`. `naming` and `replicas`
plan the resources, `container_spec` composes the answer to Allocate, and `topology` chooses GPUs
that are well connected.
"""
