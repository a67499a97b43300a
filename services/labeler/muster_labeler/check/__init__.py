"""`muster check`: what is wrong with a cluster, and what labelling it would do.

`cluster_reader` reads the cluster; `gpu_findings`, `fuse_findings` and `autoscaler_findings` say
what is wrong with it, as `findings`; `report` collects and prints them; `label_plan` says what
`label-gpus` would write.
"""
