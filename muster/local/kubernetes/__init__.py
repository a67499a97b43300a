"""A stand-in for the Kubernetes API that its real clients and kubectl can use.

`server` and `requests` handle HTTP; `objects` is the store; `writes` and `ownership` decide the
result of a write, `resources` which resources are served; `selectors`, `trees` and `refusals` are
shared.
"""

from muster.local.kubernetes.server import KubernetesApi

__all__ = ["KubernetesApi"]
