"""Authentication and authorization on the bus.

`permissions` has the rights of each role, and writes them for nats-server as configuration with
passwords; `accounts` writes them as signed tokens. `nkeys` has keys, their tokens and
.creds files.
"""
