"""The notifier: routes and groups alerts, and notifies the right people once.

`routing` decides who is notified of which alerts and when, `receivers` send to people, `delivery`
works through the outbox, and `config` reads the settings. `monitor` raises the notifier's own
alerts, `__main__` is the process, and `cli` the command line.
"""
