"""Finds the device nodes of the host, and plans which units the resources consist of.

`host_scanner` scans with `devfs` whenever `inotify` reports a change. `scan_result` contains the
nodes and selects those of each entry, and `resource_plan` combines them into units.
"""
