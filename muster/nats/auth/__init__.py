"""Authentication and authorization on the bus.

`permissions` has the rights of each role. For nats-server `server_conf` writes them as
configuration with passwords, `accounts` as signed tokens. `nkeys` has keys, their tokens and .creds
files.
"""
