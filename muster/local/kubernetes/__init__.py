"""A stand-in for the Kubernetes API that its real clients and kubectl can use.

`server` and `watches` speak HTTP; `objects` is the store, `writes` and `ownership` decide what an
object becomes, `resources` what is served, `access` who may do what; `selectors`, `trees` and
`refusals` are what they share.
"""

from muster.local.kubernetes.server import KubernetesApi

__all__ = ["KubernetesApi"]
