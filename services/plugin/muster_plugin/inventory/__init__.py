"""Tracks the health of every advertised device of the node, and creates an event for each change.

`inventory` plans the units of each resource from rules and scans. It has one `resource_devices` for
each resource, with the faults of its GPUs; every unit follows the state machine `device_lifecycle`.
`device_checks` runs the configured checks. `device_messages` turns changes into events for the bus,
and fits the whole inventory into one event.
"""
