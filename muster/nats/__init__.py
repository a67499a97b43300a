"""The bus: publishes and consumes over NATS and JetStream, and recovers from outages.

`bus` publishes events and sends heartbeats and requests; `consumers` reads events and heartbeats,
`storage` has buckets and work queues; `lock` elects a leader. Below them `jetstream` creates the
streams that `streams` describes, stores and pulls messages, `connection` recovers from outages with
`credentials`, and `compat` has all that depends on nats-py's private insides. `auth` has keys,
accounts and permissions.
"""
