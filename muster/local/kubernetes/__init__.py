"""A stand-in for the Kubernetes API that its real clients and kubectl can use.

`server` and `requests` handle HTTP, and `objects` is the store. `writes` and `ownership` determine
the result of a write, and `resources` defines the served resources. `selectors`, `trees` and
`refusals` are shared.
"""

from muster.local.kubernetes.server import KubernetesApi

__all__ = ["KubernetesApi"]
