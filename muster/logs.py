"""Door to stdout: structured log lines, one JSON object each.

A line is a constant event name in lower case with facts as keys. Doors and entry points log, once
per change of state; pure code returns reasons instead.
"""

import logging
import sys

import orjson
import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


def configure(service: str, *, level: str = "info", **facts: str) -> None:
    """Send every log line of this process to stdout, with `service` and `facts` on each."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=orjson.dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.BytesLoggerFactory(file=sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, **facts)
    # nats-py and grpc speak through logging; their errors reach us as exceptions and callbacks
    logging.getLogger("nats").setLevel(logging.CRITICAL)


def logger() -> structlog.typing.FilteringBoundLogger:
    """Return the logger of this process."""
    return structlog.get_logger()  # type: ignore[no-any-return]  # configured above
