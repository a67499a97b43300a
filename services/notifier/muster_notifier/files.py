"""Adapter: a receiver that is a file of JSON lines."""

import asyncio
import errno
import functools
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from muster_notifier import addresses, answers, aside, bodies, message
from muster_notifier import notification as notifications

_WRITE_S: Final = 10.0


class File:
    """One file."""

    def __init__(self, path: str, templates: addresses.Templates) -> None:
        self._path = Path(path)
        self._lane = aside.Lane()
        self._templates = templates

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Append one line: the CloudEvent that a webhook gets."""
        words = message.compose(notification, self._templates)
        body = bodies.body(notification, words, layout=addresses.Format.CLOUDEVENTS)
        try:
            async with asyncio.timeout(_WRITE_S):
                await self._lane.run(functools.partial(self._append, body + b"\n"))
        except TimeoutError:
            detail = f"{self._path}: not written within {_WRITE_S:g} s"
            return answers.Answer(outcome=answers.Outcome.TIMED_OUT, detail=detail)
        except OSError as error:
            detail = f"{self._path}: {error.strerror}"
            return answers.Answer(outcome=answers.Outcome.NOT_WRITTEN, detail=detail)
        return answers.Answer(outcome=answers.Outcome.TAKEN, detail=f"written to {self._path}")

    def _append(self, line: bytes) -> None:
        # one write of a whole line: lines of several writers do not mix
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        opened = os.open(self._path, flags, 0o640)
        try:
            was = os.fstat(opened)
            if not stat.S_ISREG(was.st_mode):
                raise OSError(errno.EINVAL, "no regular file")
            try:
                written = os.write(opened, line)
                os.fsync(opened)
            except OSError:
                os.ftruncate(opened, was.st_size)
                raise
            if written < len(line):
                # half a line would make the next one unreadable too
                os.ftruncate(opened, was.st_size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(opened)
