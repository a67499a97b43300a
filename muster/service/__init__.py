"""The parts that every service process needs.

`entry` is its command line, `settings` reads its configuration, which `validation` checks and of
which `sections` has the common parts; `runtime` drives its state machines and tasks, `probes`
serves health checks and metrics, `logs` writes JSON lines.
"""
