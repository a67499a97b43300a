"""Adapter: sockets: what it means that an attempt to ask somebody ended without an answer."""

import asyncio
import socket
import ssl
from typing import Final

from muster_notifier import answers

RAISED: Final = (OSError, EOFError, ValueError, asyncio.LimitOverrunError)
"""What can be raised while somebody is asked; every one is temporary."""


def meaning(
    error: Exception, *, where: str, timeout_s: float, language: str, is_sent: bool
) -> answers.Answer:
    """Return what it means that an attempt ended without an answer.

    `is_sent` says that all had been sent by then.
    """
    match error:
        case TimeoutError():
            outcome, detail = answers.Outcome.TIMED_OUT, f"no answer within {timeout_s:g} s"
        case ssl.SSLCertVerificationError():
            outcome = answers.Outcome.NOT_TRUSTED
            detail = f"its certificate is not believed: {error.verify_message}"
        case ssl.SSLError():
            outcome, detail = answers.Outcome.NOT_TRUSTED, f"TLS: {error.reason or error}"
        case socket.gaierror():
            outcome, detail = answers.Outcome.NO_SUCH_HOST, error.strerror or str(error)
        case EOFError() | ConnectionResetError() | BrokenPipeError():
            outcome, detail = answers.Outcome.CLOSED, "closed the connection without an answer"
        case OSError():
            outcome, detail = answers.Outcome.UNREACHABLE, error.strerror or str(error)
        case _:
            outcome, detail = answers.Outcome.NONSENSE, f"the answer is not {language}"
    return answers.Answer(outcome=outcome, detail=f"{where}: {detail}", is_unknown=is_sent)
