"""The command `muster`: shows a fleet's state and events, manages silences and keys.

`registry` lists all commands, including those of the services. The commands print with `output` and
`texts`, and use NATS through `events`. Every other module is a command or a part of a command.
"""
