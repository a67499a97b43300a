"""Stand-ins for what muster does not ship: kubelet, Kubernetes API, webhook receiver; NATS."""
