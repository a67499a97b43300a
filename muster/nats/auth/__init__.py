"""Authentication and authorization on the bus.

`permissions` has the rights of each role, which are written for nats-server as configuration with
passwords (`accounts_conf`) or as signed tokens (`accounts`). `nkeys` has keys, their tokens and
.creds files, `jws` the form of signed tokens.
"""
