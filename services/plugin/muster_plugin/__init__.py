"""Speaks the kubelet's device plugin API on one node, and reports to the bus."""
