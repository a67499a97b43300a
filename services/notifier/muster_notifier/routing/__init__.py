"""Decides which receiver is notified of which alerts, when and why; without any I/O.

`routes` and `muting` hold the rules, `alert_index` and `groups` the state, `decision` and
`grouping` conclude. `notifications` are the result, and what the ledger stores of them.
"""
