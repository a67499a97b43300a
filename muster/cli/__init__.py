"""The command `muster`: the state of a fleet, events, silences and keys; muster on a laptop.

`registry` lists all commands, including those of the services. They print with `output` and
`texts`, and use NATS through `events`. Every other module is a command or a part of a command.
"""
