"""The Kubernetes API client that several services share.

`client` finds a cluster and our credentials, `api` sends requests, `watch` keeps all objects of one
kind up to date, `lease` elects a leader. `objects` and `scheduling` are pure: the shapes of objects
that we read, label selectors, and resource quantities.
"""
