"""The types and names that all other packages share; imports no other package.

`advertised` is a device as the kubelet sees it, `gpu` what is observed of GPUs; `names`, `patterns`
and `selectors` are the names and patterns of the configuration, `errors` its problems.
"""
