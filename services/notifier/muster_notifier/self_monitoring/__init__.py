"""What the notifier observes by itself, also when nobody else can.

`watchdog` notices that health is silent, `monitor` raises the notifier's own alerts.
"""
