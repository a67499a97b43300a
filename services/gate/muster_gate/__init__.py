"""Decides for nats-server which clients may connect, and binds each plugin to its node.

`callout` decides, `tokens` verifies a projected service account token with the cluster's public
keys, `cluster_keys` fetches these keys, and `config` defines the settings. `rate_limiter` decides
which nodes send too much, `traffic_monitor` measures that, and `issuer` makes the gate's signing
key.
"""
