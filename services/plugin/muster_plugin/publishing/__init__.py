"""Publishes changes to the kubelet first, then to the log and the bus.

`device_updates` keeps that order, and publishes allocations by the kubelet's podresources;
`event_log` logs and publishes events, `heartbeats` builds heartbeats.
"""
