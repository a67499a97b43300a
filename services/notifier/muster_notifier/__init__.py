"""The notifier: routes and groups alerts, and notifies the right people once.

Packages: `routing` decides who is notified of what and when, `receivers` send to people,
`delivery` works through the outbox, `config` holds the settings. `monitor` raises the notifier's
own alerts, `__main__` is the process, `cli` the command line.
"""
