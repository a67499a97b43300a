"""The types and names that all other packages share; imports no other package.

`advertised` are resources and devices as the kubelet sees them, `gpu` what is observed of GPUs and
the selectors that name them, `patterns` globs and regular expressions, `errors` the problems of a
configuration.
"""
