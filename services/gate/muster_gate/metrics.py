"""Adapter: Prometheus: what the gate counts."""

from typing import Final

import prometheus_client

ANSWERS: Final = prometheus_client.Counter(
    "muster_gate_answers_total", "Who asked to come in: admitted, or why not.", ["outcome"]
)
DECIDING: Final = prometheus_client.Histogram(
    "muster_gate_decision_seconds",
    "What one answer takes.",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)
KEYS: Final = prometheus_client.Gauge("muster_gate_keys", "Public keys of the cluster at hand.")
HEARD: Final = prometheus_client.Gauge(
    "muster_gate_keys_heard_timestamp_seconds", "When the keys were last as the cluster has them."
)
SIGNING: Final = prometheus_client.Gauge(
    "muster_gate_signing_usable", "0 while gate.json is not as it should be: the old one is used."
)
FETCHES: Final = prometheus_client.Counter(
    "muster_gate_key_fetches_total", "Looks for the cluster's keys, by outcome.", ["outcome"]
)
