"""A stand-in for the Kubernetes API that its real clients and kubectl can use."""

from muster.local.kubernetes.server import KubernetesApi

__all__ = ["KubernetesApi"]
