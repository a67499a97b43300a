"""The Kubernetes API client that several services share.

`client` finds a cluster and its credentials, `api` sends requests, `watch` follows all objects of
one kind, and `lease` elects a leader. `objects`, `scheduling` and `known_plugins` are pure: the
objects that muster reads, selectors and quantities, and well-known device plugins.
"""
