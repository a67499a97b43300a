"""Alerts that the notifier raises itself, because nobody else can.

`watchdog` notices that health is silent, `monitor` raises the notifier's own alerts.
"""
