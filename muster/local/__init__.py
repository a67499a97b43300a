"""Runs muster on a laptop: a kubelet, Kubernetes API and webhook stand-in, and a real NATS.

They behave as the real programs do, and share no code with what they stand in for. `stack` runs all
of muster on them (`muster up`), with programs that `processes` runs.
"""
