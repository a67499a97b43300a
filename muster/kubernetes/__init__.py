"""The Kubernetes API client that several services share.

`client` finds a cluster and its credentials, `api` sends requests, `watch` follows all objects of
one kind, `lease` elects a leader, and `port_forward` forwards ports to pods. The other modules are
pure: they define the objects that muster reads, evaluate selectors and quantities, select muster's
pods, and find device plugins and DRA drivers that do not work.
"""
