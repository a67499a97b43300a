"""The bus: publishes and consumes over NATS and JetStream, and recovers from outages.

`bus` publishes events and sends heartbeats and requests; `consumers` reads events and heartbeats,
`storage` has buckets and work queues; `lock` elects a leader. Below them `jetstream` creates the
streams that `streams` describes, stores and pulls messages, `connection` recovers from outages with
`credentials`, and `compat` has all code that depends on private parts of nats-py. `auth` has keys,
accounts and permissions.
"""
