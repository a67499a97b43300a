"""Connects health's detector to the NATS bus.

`inputs` puts heartbeats, reports, restored state, leadership and the answers to probes into the
detector's inbox; `nats_connections` adds what nats-server says about connections. `outputs`
executes what the detector decides, and saves its state. `self_monitoring` publishes the tick by
which others notice that health works, and notifies people without the bus.
"""
