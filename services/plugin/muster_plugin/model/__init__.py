"""The types and names that all other packages share; it imports nothing of the plugin.

`advertised` is a device as the kubelet sees it, `gpu` what is observed of GPUs, `scan_result` what
is found on the host; `names`, `patterns` and `selectors` are the names and patterns of the
configuration, `errors` its problems.
"""
