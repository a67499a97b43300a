"""The bus: publishes and consumes over NATS and JetStream, and recovers from outages.

`bus` publishes events and sends heartbeats and requests. `consumers` reads events, `storage`
provides buckets and work queues, and `leader_lock` elects a leader. Below them, `jetstream` creates
the streams that `streams` defines, and stores and pulls messages. `connection` recovers from
outages, `credentials` reads credentials, and `compat` contains all code that depends on private
parts of nats-py. `auth` contains keys, accounts and permissions.
"""
