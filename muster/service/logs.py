"""Adapter for stdout: structured log lines, one JSON object each.

A line is a constant event name in lower case with facts as keys. Adapters and entry points log,
once per change of state; pure code returns reasons instead.
"""

import json
import logging
import os
import sys
from collections.abc import Callable

import orjson
import structlog

from muster import escaping


class _Stdout:
    """Unbuffered standard output, so that lines cannot pile up behind a slow reader."""

    lost = 0

    def __init__(self) -> None:
        self._descriptor = sys.stdout.fileno()

    def msg(self, line: bytes) -> None:
        """Write a line; if the reader is gone, drop the line and continue."""
        rest = line + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            _Stdout.lost += 1

    debug = info = warning = error = critical = msg


def configure(service: str, *, level: str = "info", **facts: str) -> None:
    """Write every log line of this process to stdout, with `service` and `facts` on each line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_serialized),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_Stdout,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, **facts)
    # nats-py also logs its errors, which arrive as exceptions and callbacks anyway
    logging.getLogger("nats").setLevel(logging.CRITICAL)


def lines_lost() -> int:
    """Return how many lines could not be written to stdout."""
    return _Stdout.lost


def logger() -> structlog.typing.FilteringBoundLogger:
    """Return the logger of this process.

    A program that never called `configure` only uses the SDK: `logging` shows its warnings.
    """
    if structlog.is_configured():
        return structlog.get_logger()  # type: ignore[no-any-return]  # as `configure` made it
    return structlog.wrap_logger(  # type: ignore[no-any-return]  # of the class given here
        logging.getLogger("muster"),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        processors=[structlog.processors.KeyValueRenderer(key_order=["event"])],
    )


def _serialized(line: object, *, default: Callable[[object], object]) -> bytes:
    try:
        encoded = orjson.dumps(line, default=default)
    except TypeError:
        # orjson refuses values that a device may report: half a surrogate pair, numbers of 65 bits
        return json.dumps(line, default=default).encode()
    return escaping.json_text(encoded).encode()
