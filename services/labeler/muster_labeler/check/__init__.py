"""`muster check`: finds the problems of a cluster; also plans how to label its nodes.

`cluster_reader` reads the cluster; `gpu_findings`, `fuse_findings` and `autoscaler_findings` say
what is wrong with it, as `findings`; `report` collects and prints them; `label_plan` says what
`label-gpus` would write.
"""
