"""Adapter: Prometheus: what was given to NATS and what was taken from it, by outcome."""

from typing import Final

import prometheus_client

PUBLISHED: Final = prometheus_client.Counter(
    "muster_bus_published_total", "Messages given to NATS, by outcome.", ["outcome"]
)
RECEIVED: Final = prometheus_client.Counter(
    "muster_bus_received_total", "Messages taken from NATS, by outcome.", ["outcome"]
)
