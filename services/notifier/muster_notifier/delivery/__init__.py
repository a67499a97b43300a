"""Delivers notifications from the outbox to receivers, with retries, and records the results.

`dispatcher` runs a worker for each receiver. `worker` sends the notifications in the receiver's
`queue`, and reports the result of each. `dead_letters` defines how undeliverable notifications are
stored. `without_nats` notifies receivers of an outage of NATS.
"""
