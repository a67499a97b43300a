"""Pure: The configuration sections that every service has; they read the same everywhere."""

import enum
import re
from typing import Annotated, Literal

import msgspec

from muster import vocabulary

_HOST = r"([^\s,/@:?#\[\]]+|\[[0-9a-fA-F:.]+\])"
_URL = rf"(nats|tls)://([^\s,/@]+@)?{_HOST}(:[0-9]{{1,5}})?/?"
_URLS = re.compile(rf"{_URL}(,{_URL})*")


class LogLevel(enum.StrEnum):
    """How much a service tells on stdout."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Period = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
"""Seconds, more than none and at most a day."""
Pause = Annotated[float, msgspec.Meta(ge=0.1, le=86_400)]
"""Seconds between two times of something that costs: at least a tenth, at most a day."""


class Bus(msgspec.Struct, frozen=True, kw_only=True):
    """Where NATS is: `nats://host:port`, several separated by commas."""

    url: str = "nats://127.0.0.1:4222"

    def __post_init__(self) -> None:
        """Refuse what nats-py would dial for ever."""
        if not _URLS.fullmatch(self.url):
            raise ValueError(f"url: {self.url!r} is not like nats://host:4222")


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """How many servers of NATS keep each stream: 1, or 3 or 5 of as many that find one another.

    What has more keeps them.
    """

    replicas: Literal[1, 3, 5] = 1


class Http(msgspec.Struct, frozen=True, kw_only=True):
    """Where probes and metrics are served; port 0 is a free port, told in the log."""

    host: vocabulary.Name = "127.0.0.1"
    port: Port = 0


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """How much is logged."""

    level: LogLevel = LogLevel.INFO
