"""Connects health's detector to the NATS bus.

`inputs` puts heartbeats, reports, restored state and leadership into the detector's inbox;
`nats_connections` adds what nats-server says about connections (`nats_advisories` decodes it) and
`probes` the answers to probes. `outputs` executes what the detector decides: `keyed_executor`
orders it by node, `state_store` saves state, `verdict_log` logs, `watchdog` publishes the tick by
which others notice that health works, and `out_of_band_alarm` notifies people without the bus.
"""
