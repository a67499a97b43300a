"""muster: the Kubernetes device plugin suite that never fails silently."""

__version__ = "0.1.0"
