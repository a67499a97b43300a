"""Every device of the node as it is advertised, with its health, and the events of its changes.

`planner` combines rules and scans into what each resource consists of; `inventory` holds a
`resource_devices` for each, whose units follow the state machine `device_lifecycle`.
`active_faults` are the faults of GPUs, `device_checks` the configured checks. `device_events` turns
changes into events for the bus, `snapshot` fits the whole inventory into one.
"""
