"""Speaks the kubelet's device plugin API on one node, and reports to the bus."""

from muster_plugin import lean

lean.load("structlog", without="rich")
lean.load("grpc.aio")
