"""Decides which receiver is notified of which alerts, when and why, without any I/O.

`routes` and `muting` are the rules, `alert_index` and `groups` the state; `decision` and `grouping`
decide. `notifications` defines the result, and what the ledger stores of it.
"""
