"""Delivers notifications from the outbox to a receiver, with retries, and records the result.

`dispatcher` runs all receivers, `worker` runs one of them with its `queue` and reports what became
of each notification, `dead_letters` keeps what could not be delivered.
"""
