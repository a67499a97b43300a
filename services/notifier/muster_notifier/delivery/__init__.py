"""Delivers notifications from the outbox to receivers, with retries, and records the results.

`dispatcher` runs all receivers. `worker` runs one receiver with its `queue`, and reports the result
of each notification. `dead_letters` defines how undeliverable notifications are stored.
"""
