"""Decides which receiver is notified of which alerts, when and why, without any I/O.

`routes` and `muting` define the rules, and `alert_index` and `groups` hold the state. `decision`
and `grouping` decide. `notifications` defines notifications and the ledger's entries about them.
"""
