"""Routes and groups alerts, and notifies the right people.

`routing` decides who is notified of which alerts and when. `receivers` sends notifications to
people, `delivery` queues and retries them, and `config` reads the settings. `monitor` raises the
notifier's own alerts, `__main__` runs the process, and `cli` defines the commands.
"""
