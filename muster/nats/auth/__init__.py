"""Authentication and authorization on the bus.

`permissions` defines the rights of each role. For nats-server, `server_conf` writes them as
configuration for users with passwords, and `accounts` as signed tokens. `nkeys` implements keys,
tokens and .creds files.
"""
