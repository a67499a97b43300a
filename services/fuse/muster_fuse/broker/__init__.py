"""Serves the pods' sockets: receives requests, has them decided and carried out, and replies."""
