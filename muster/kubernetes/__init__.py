"""The Kubernetes API client that several services share.

`client` finds a cluster and the credentials, `api` sends requests, `watch` keeps all objects of one
kind up to date, and `lease` elects a leader. `objects` and `scheduling` are pure: the shapes of the
objects that muster reads, label selectors, and resource quantities.
"""
