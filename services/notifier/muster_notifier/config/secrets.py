"""Adapter: reads secrets from a file, a place in a YAML file or a variable, and masks them."""

import os
import urllib.parse
from pathlib import Path
from typing import Final

import msgspec
import yaml

from muster_notifier.config import receiver_settings

_SECRET_BYTES_MAX: Final = 1024 * 1024
_MASKED_MIN: Final = 6
"""What is shorter stands in many texts by chance."""


class NoSecret(Exception):
    """A secret cannot be read; the text says where it should be, and never what it is."""


class SecretReader:
    """Reads secrets, and hides those that it has read in texts."""

    def __init__(self) -> None:
        self._read: list[str] = []

    def read(self, where: receiver_settings.Secret) -> str:
        """Return a secret. Raises NoSecret."""
        value = secret(where)
        self._read.append(value)
        return value

    def mask(self, text: str) -> str:
        """Return the text without the secrets; of a URL also without what follows its host."""
        paths = [value.partition("://")[2].partition("/")[2] for value in self._read]
        decoded = [urllib.parse.unquote(path) for path in paths]
        hidden = {value for value in (*self._read, *paths, *decoded) if len(value) >= _MASKED_MIN}
        for value in sorted(hidden, key=len, reverse=True):
            text = text.replace(value, "(secret)")
        return text


def secret(where: receiver_settings.Secret) -> str:
    """Return a secret. Raises NoSecret."""
    if where.env is not None:
        value = os.environ.get(where.env, "").strip()
        if not value:
            raise NoSecret(f"the variable {where.env} is not set")
        return value
    assert where.file is not None, "a secret is in a file or in a variable"
    try:
        with Path(where.file).open("rb") as opened:
            text = opened.read(_SECRET_BYTES_MAX)
        value = (text.decode() if where.at is None else _inside(text, where.at)).strip()
    except OSError as error:
        raise NoSecret(f"{where.file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NoSecret(f"{where.file}: no text") from None
    if not value:
        raise NoSecret(f"{where.file}{': ' + where.at if where.at else ''}: empty")
    return value


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
