"""The runtime of every service process: settings, event loop, probes, metrics and logs.

`entry` is the command line. `settings` reads the configuration, `validation` checks it, and
`sections` defines the sections that services share. `runtime` drives state machines and tasks,
`probes` serves health checks and metrics, and `logs` writes JSON lines.
"""
