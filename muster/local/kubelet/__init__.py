"""A stand-in for the kubelet that behaves like kubelet 1.37 (or 1.34), but runs no containers.

`server` is the kubelet; `device_manager` and `rules` make its decisions. `plugins`, `pods` and
`node_status` communicate with device plugins and the Kubernetes API. `sockets` serves the kubelet's
own sockets and answers podresources clients.
"""

from muster.local.kubelet.server import Kubelet

__all__ = ["Kubelet"]
