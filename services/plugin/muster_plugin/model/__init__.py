"""The types and names that all other packages share; it imports nothing of the plugin.

`advertised` is a device as the kubelet sees it, `gpu` what is observed of GPUs; `names`, `patterns`
and `selectors` are the names and patterns of the configuration, `errors` its problems.
"""
