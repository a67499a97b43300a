"""The types and names that all other packages share; this package imports none of them.

`advertised` has resources and devices as the kubelet sees them, `gpu` the observations of GPUs and
the selectors that name GPUs, `patterns` globs and regular expressions, and `errors` the problems of
a configuration.
"""
