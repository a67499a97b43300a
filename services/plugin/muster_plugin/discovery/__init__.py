"""Finds the device nodes of the host, and plans which units the resources consist of.

`host_scanner` scans with `devfs` whenever `inotify` reports a change; `scan_result` holds what
it found and selects the nodes of each entry, and `resource_plan` makes units of them.
"""
