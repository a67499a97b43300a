"""The bus: publishing and consuming over NATS and JetStream, through every outage.

`bus` publishes events and sends heartbeats and requests; `consumers`, `heartbeat_stream`, `buckets`
and `work_queue` read; `lock` elects a leader. Below them `jetstream` stores and pulls messages,
`admin` creates the streams that `streams` describes, `connection` recovers from outages with
`credentials`, and `compat` has all that depends on nats-py's private insides. `auth` has keys,
accounts and permissions.
"""
