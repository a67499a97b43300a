"""Publishes what changes: to the kubelet first, then to the log and the bus.

`update_publisher` keeps that order, `event_log` logs and publishes events, `pod_devices` publishes
allocations by the kubelet's podresources, `heartbeats` builds heartbeats.
"""
