"""The node's GPUs: what is advertised, what containers get, and their health.

`source` runs an observer of GPUs (`nvml` or `simulated`) and evaluates its observations with
`health_state`, which is built from `poll_signals`, `recovery` and `xid_policy`; `policy_files`
reads the policy. `naming` and `replicas` plan the resources, `container_spec` is the answer to
Allocate, `placement` and `topology` are the preferred allocation.
"""
