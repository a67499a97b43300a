"""Adapter: the certificate that NATS shows us: when it ends, all who believe it are locked out.

Every client tells when that is, because nobody else does before it is too late.
"""

from typing import Final

import nats.aio.client
import prometheus_client

_ENDS: Final = prometheus_client.Gauge(
    "muster_bus_certificate_ends_timestamp_seconds",
    "When the certificate of the NATS server ends to which we are connected; 0 without TLS.",
)


def note(client: nats.aio.client.Client) -> None:
    """Read when the certificate of a connection ends."""
    # nats-py shows its socket nowhere (2.16)
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001
    shown = writer.get_extra_info("peercert") if writer else None
    ends = shown.get("notAfter") if shown else None
    if ends is None:
        _ENDS.set(0)
        return
    # OpenSSL costs memory: only who speaks TLS has loaded it
    import ssl  # noqa: PLC0415

    _ENDS.set(ssl.cert_time_to_seconds(ends))
