"""Which receiver is notified of which alerts, when and why; no input or output.

`routes`, `intervals` and `muting` hold the rules, `alert_index`, `groups` and `scheduling` the
state, `decision` and `grouping` conclude. `notifications` and `ledger` are what is stored.

"""
