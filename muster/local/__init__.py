"""Runs muster on a laptop: a kubelet, Kubernetes API and webhook stand-in, and a real NATS.

The stand-ins behave like the real programs, and share no code with them. `stack` runs all of muster
on them (`muster up`), with programs that `processes` runs.
"""
