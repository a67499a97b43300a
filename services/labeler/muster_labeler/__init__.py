"""The labeler: it gives GPU nodes the labels that name their accelerators.

`model` is what it keeps of the cluster; `naming` turns products into names; `kubernetes` reads and
writes nodes; `service` decides and reconciles; `check` finds what is wrong with a cluster; `cli`
has the commands `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.
"""
