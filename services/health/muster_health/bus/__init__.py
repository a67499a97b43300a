"""Connects health's detector to the NATS bus.

`inputs` puts heartbeats, reports, restored state, leadership and the answers to probes into the
detector's inbox; `nats_connections` adds nats-server's reports about connections. `outputs` carries
out the detector's outputs, and saves its state. `self_monitoring` publishes the tick that shows
that health works, and notifies people without the bus.
"""
