"""A stand-in for the Kubernetes API that its real clients and kubectl can use.

`server` and `requests` are its HTTP; `objects` is the store, `writes` and `ownership` decide what
an object becomes, `resources` what is served; `selectors`, `trees` and `refusals` are shared.
"""

from muster.local.kubernetes.server import KubernetesApi

__all__ = ["KubernetesApi"]
