"""A stand-in for the kubelet: it behaves as kubelet 1.36 does, and has no containers."""

from muster.local.kubelet.server import Kubelet

__all__ = ["Kubelet"]
