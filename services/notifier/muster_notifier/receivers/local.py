"""Adapter for local receivers: a file of JSON lines, and the notifier's own log."""

import asyncio
import errno
import functools
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muster import blocking
from muster.service import logs
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import message, results, webhook
from muster_notifier.routing import notifications

_WRITE_S: Final = 10.0


class File:
    """Appends notifications to one file."""

    def __init__(self, path: str, composer: message.Composer) -> None:
        self._path = Path(path)
        self._blocking = blocking.Serial()
        self._composer = composer

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Append one line, with the same CloudEvent that a webhook gets."""
        text = self._composer.compose(notification)
        body = webhook.encode_body(notification, text, format_=receiver_settings.Format.CLOUDEVENTS)
        try:
            async with asyncio.timeout(_WRITE_S):
                await self._blocking.run(functools.partial(self._append, body + b"\n"))
        except TimeoutError:
            detail = f"{self._path}: not written within {_WRITE_S:g} s"
            return results.Result(results.Outcome.TIMED_OUT, detail)
        except OSError as error:
            detail = f"{self._path}: {error.strerror}"
            return results.Result(results.Outcome.WRITE_FAILED, detail)
        return results.Result(results.Outcome.ACCEPTED, f"written to {self._path}")

    def _append(self, line: bytes) -> None:
        # one write for a whole line, so that lines of several writers do not mix
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        opened = os.open(self._path, flags, 0o640)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            written = os.write(opened, line)
            try:
                os.fsync(opened)
            except OSError:
                _remove_last(opened, written)
                raise
            if written < len(line):
                _remove_last(opened, written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(opened)


class Console:
    """Writes notifications to the notifier's log."""

    def __init__(self, composer: message.Composer) -> None:
        self._composer = composer

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Log one notification."""
        text = self._composer.compose(notification)
        logs.logger().info(
            "notification_logged", id=notification.id, text=f"{text.title}\n{text.text}"
        )
        return results.Result(results.Outcome.ACCEPTED, "logged")


def _remove_last(opened: int, written: int) -> None:
    """Remove the bytes of the last write from the file, unless it has changed since.

    Half a line would make the next line unreadable, too, but another process may have appended one.
    """
    end = os.lseek(opened, 0, os.SEEK_CUR)
    if os.fstat(opened).st_size == end:
        os.ftruncate(opened, end - written)
