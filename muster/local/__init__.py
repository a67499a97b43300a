"""Stand-ins for a laptop: a kubelet, the Kubernetes API, a webhook receiver; a real NATS server.

They behave as the real programs do, and share no code with what they stand in for. `stack` runs all
of muster on them (`muster up`); `layout` has its programs and settings; `processes` runs programs.
"""
