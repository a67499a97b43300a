"""The gate answers nats-server's question who may connect, and binds each plugin to its node.

`callout` answers; `tokens` verifies a projected service account token by the cluster's public keys,
which `cluster_keys` fetches; `config` has the settings.
"""
