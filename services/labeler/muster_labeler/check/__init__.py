"""Finds problems in a cluster for `muster check`; also plans how to label its nodes.

`cluster_reader` reads the cluster; `gpu_findings`, `fuse_findings` and `autoscaler_findings` report
its problems as `findings`; `label_plan` plans what `label-gpus` writes.
"""
