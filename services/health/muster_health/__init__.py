"""Detects plugins that failed silently, diagnoses the failure, and raises alerts.

`bus` and `kubernetes` are the adapters. `plugin` is the state machine of one plugin, `fleet` the
detector that routes events to all plugins, and `alerting` turns verdicts into alerts. `replay`
records the detector's inputs and replays them under another policy. `model` defines the data that
all of these share.
"""
