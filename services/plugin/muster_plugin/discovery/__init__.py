"""Finds the device nodes of the host, and plans the units of each resource.

`host_scanner` scans with `devfs` whenever `inotify` reports a change. `scan_result` contains the
nodes and selects those of each entry, and `resource_plan` combines them into units.
"""
