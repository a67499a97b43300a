"""Serves the sockets of pods: receives requests, has them decided and done, and answers."""
