"""The parts that every service process needs.

`entry` is the command line, `settings` reads the configuration, `validation` checks it, and
`sections` has its common parts; `runtime` drives state machines and tasks, `probes` serves health
checks and metrics, and `logs` writes JSON lines.
"""
