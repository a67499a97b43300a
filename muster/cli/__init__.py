"""The command `muster`: the state of a fleet, its events, silences and keys; all of it on a laptop.

`registry` lists the commands, those of the services too. They share `output` and `texts` for what
they print, and `events` for NATS. Every other module is a command or a part of one.
"""
