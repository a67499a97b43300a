"""Labels GPU nodes with the names of their accelerators.

`model` defines the labeler's view of the cluster; `naming` derives names from products;
`kubernetes` reads and writes nodes; `service` decides and reconciles; `check` finds problems in a
cluster; `cli` defines `muster check`, `label-gpus`, `unlabel-gpus`, `uninstall` and `gpu-name`.
"""
