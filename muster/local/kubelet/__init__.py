"""A stand-in for the kubelet that behaves like kubelet 1.36, but runs no containers.

`server` is the kubelet; `device_manager` and `rules` decide; `plugins`, `pods`, `podresources` and
`node_status` are its sides to device plugins, pods, podresources clients and the Kubernetes API;
`directories` has its sockets and its checkpoint.
"""

from muster.local.kubelet.server import Kubelet

__all__ = ["Kubelet"]
