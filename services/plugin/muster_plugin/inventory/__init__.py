"""Keeps every advertised device of the node with its health, and creates events of changes.

`inventory` combines rules and scans into what each resource consists of, and holds a
`resource_devices` for each, with the faults of its GPUs, whose units follow the state machine
`device_lifecycle`. `device_checks` runs the configured checks. `device_messages` turns changes into
events for the bus, and fits the whole inventory into one.
"""
