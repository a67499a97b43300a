"""Adapter: the packages of the stand-ins: kubelet, Kubernetes API, webhook receiver; NATS.

structlog loads rich where it is installed, a quarter of what a start costs; nobody here uses it.
"""

from muster import lean

lean.load("structlog", without=["rich"])
