"""Finds problems in a cluster for `muster check`; also plans how to label its nodes.

`cluster_reader` reads the cluster; `fuse_ways` and the modules named `..._findings` report its
problems as `findings`; `label_plan` plans what `label-gpus` writes.
"""
