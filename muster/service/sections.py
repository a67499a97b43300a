"""Pure: the configuration sections and value types that several services share."""

import enum
import re
from typing import Annotated, Literal

import msgspec

from muster import vocabulary

_HOST = r"([^\s,/@:?#\[\]]+|\[[0-9a-fA-F:.]+\])"
_URL = rf"(nats|tls)://([^\s,/@]+@)?{_HOST}(:[0-9]{{1,5}})?/?"
_URLS = re.compile(rf"{_URL}(,{_URL})*")


class LogLevel(enum.StrEnum):
    """The lowest level of log lines that a service writes."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Period = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""A duration in seconds: more than 0 and at most a day."""
Pause = Annotated[float, msgspec.Meta(ge=0.1, le=86_400)]
"""The interval between expensive actions in seconds: from 0.1 to a day."""


class Bus(msgspec.Struct, frozen=True, kw_only=True):
    """The address of NATS: `nats://host:port`, or several separated by commas."""

    url: str = "nats://127.0.0.1:4222"

    def __post_init__(self) -> None:
        """Reject an address that nats-py would retry forever."""
        if not _URLS.fullmatch(self.url):
            raise ValueError(f"url: {self.url!r} is not an address such as nats://host:4222")


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """How many NATS servers store each stream: 1, or 3 or 5 servers of a cluster.

    A stream that already has more replicas keeps them.
    """

    replicas: Literal[1, 3, 5] = 1


class Http(msgspec.Struct, frozen=True, kw_only=True):
    """The address of probes and metrics; port 0 means a free port, which is logged."""

    host: vocabulary.Name = "127.0.0.1"
    port: Port = 0


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for logging."""

    level: LogLevel = LogLevel.INFO
