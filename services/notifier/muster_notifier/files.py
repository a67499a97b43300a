"""Adapter: files: a receiver that is a file of JSON lines, and the files that hold secrets."""

import asyncio
import errno
import functools
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import yaml

from muster_notifier import addresses, answers, aside, bodies, message
from muster_notifier import notification as notifications

_SECRET_BYTES_MAX: Final = 1024 * 1024
_WRITE_S: Final = 10.0


class NoSecret(Exception):
    """A secret cannot be had; the text says where it should be, and never what it is."""


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


def secret(where: addresses.Secret) -> str:
    """Return a secret. Raises NoSecret."""
    if where.env is not None:
        found = os.environ.get(where.env, "").strip()
        if not found:
            raise NoSecret(f"the variable {where.env} is not set")
        return found
    assert where.file is not None, "a secret is in a file or in a variable"
    try:
        with Path(where.file).open("rb") as opened:
            text = opened.read(_SECRET_BYTES_MAX)
        found = (text.decode() if where.at is None else _inside(text, where.at)).strip()
    except OSError as error:
        raise NoSecret(f"{where.file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NoSecret(f"{where.file}: no text") from None
    if not found:
        raise NoSecret(f"{where.file}{': ' + where.at if where.at else ''}: empty")
    return found


def _inside(text: bytes, at: str) -> str:
    """Return a value within a YAML file."""
    try:
        branch: object = yaml.safe_load(text)
        for key in at.split("."):
            branch = (
                msgspec.convert(branch, list[object])[int(key)]
                if key.isdigit()
                else msgspec.convert(branch, dict[str, object])[key]
            )
        return msgspec.convert(branch, str)
    except (yaml.YAMLError, ValueError, LookupError):
        return ""
