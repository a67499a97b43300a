"""The types and names that all other packages share; this package imports none of them.

`advertised` defines resources and devices as the kubelet sees them. `gpu` defines the observations
of GPUs and the selectors that name them. `patterns` matches globs and regular expressions, and
`errors` reports problems of a configuration.
"""
