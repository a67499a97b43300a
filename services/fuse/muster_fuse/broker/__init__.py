"""Serves the pods' sockets: receives requests, has them checked and executed, and replies."""
