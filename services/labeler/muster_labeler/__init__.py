"""The labeler: gives GPU nodes the labels that name their accelerators.

`model` has the data that it keeps about the cluster; `naming` turns products into names;
`kubernetes` reads and writes nodes; `service` decides and reconciles; `check` finds what is wrong
with a cluster; `cli` has the commands `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.
"""
