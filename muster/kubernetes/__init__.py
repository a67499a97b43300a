"""The Kubernetes API client that several services share.

`client` finds a cluster and the credentials, `api` sends requests, `watch` keeps all objects of one
kind up to date, and `lease` elects a leader. `objects`, `scheduling` and `known_plugins` are pure:
the objects that muster reads, selectors and quantities, and well-known device plugins.
"""
