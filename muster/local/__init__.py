"""Runs muster on a laptop: stand-ins for kubelet, Kubernetes API and webhook, and a real NATS.

The stand-ins behave like the real programs, and share no code with muster's services. `stack` runs
all of muster on them (`muster up`); `processes` runs the programs.
"""
