"""Pure. The configuration sections that every service has; they read the same everywhere."""

import enum
from typing import Annotated

import msgspec

from muster import vocabulary


class LogLevel(enum.StrEnum):
    """How much a service tells on stdout."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Period = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""Seconds, more than none and at most a day."""


class Bus(msgspec.Struct, frozen=True, kw_only=True):
    """Where NATS is: `nats://host:port`, several separated by commas."""

    url: Annotated[str, msgspec.Meta(pattern=r"^(nats|tls)://[^\s]+$")] = "nats://127.0.0.1:4222"


class Http(msgspec.Struct, frozen=True, kw_only=True):
    """Where probes and metrics are served; port 0 is a free port, told in the log."""

    host: vocabulary.Name = "127.0.0.1"
    port: Port = 0


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """How much is logged."""

    level: LogLevel = LogLevel.INFO
