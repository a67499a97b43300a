"""Adapter: reads configuration files, the notifier's own or an Alertmanager's, and secrets."""

import functools
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from muster.service import logs, settings
from muster_notifier.config import (
    alertmanager_file,
    alertmanager_importer,
    receiver_settings,
    schema,
)

PREFIX: Final = "MUSTER_NOTIFIER"
_SECRET_BYTES_MAX: Final = 1024 * 1024
_HIDDEN: Final = "(secret)"
_SCHEMES: Final = ("http", "https")
_MASKED_MIN: Final = 6
"""The minimum length of a secret that is masked; shorter strings occur in many texts by chance."""


def alertmanager(text: bytes, source: str) -> dict[str, Any]:
    """Convert an Alertmanager file to a tree of our settings; log each left-out part and loss once.

    Raises BadSettings.
    """
    tree, importer = translate(text, source)
    for line in importer.left_out:
        _log(source, line)
    for line in importer.losses:
        _log_loss(source, line)
    return tree


def translate(text: bytes, source: str) -> tuple[dict[str, Any], alertmanager_importer.Importer]:
    """Convert an Alertmanager file; return a tree of our settings, and the importer.

    The importer lists what it has left out. Raises BadSettings.
    """
    documents = settings.parse(text, source=source)
    importer = alertmanager_importer.Importer(str(Path(source).absolute()))
    try:
        tree = importer.read(documents[0] if documents else {})
    except alertmanager_file.Unreadable as error:
        raise settings.BadSettings([f"{source}: {error}"]) from None
    return tree, importer


FORMATS: Final[Mapping[str, settings.Foreign]] = {"alertmanager": alertmanager}


def read(file: Path, *, written_for: str, environment: Mapping[str, str]) -> schema.Settings:
    """Return the settings from a file and the environment; `written_for` is the file's format.

    Raises BadSettings.
    """
    return settings.load(
        schema.Settings,
        prefix=PREFIX,
        file=file,
        environment=environment,
        foreign=FORMATS.get(written_for),
    )


def receiver(text: bytes, *, name: str, directory: Path) -> receiver_settings.Receiver:
    """Return the receiver that a file in the receivers directory defines. Raises BadSettings.

    Its secrets must be files in that directory. Otherwise, anyone who may add a receiver could send
    other secrets of the notifier to an address of their own.
    """
    documents = settings.parse(text, source=name)
    tree = documents[0] if len(documents) == 1 else None
    if not isinstance(tree, dict) or not tree:
        raise settings.BadSettings([f"{name}: expected the settings of one receiver"])
    if tree.setdefault("name", name) != name:
        raise settings.BadSettings([f"{name}: name: must equal the file's name or be omitted"])
    problems: list[str] = []
    placed = _placed(tree, directory, problems)
    if problems:
        raise settings.BadSettings([f"{name}: {problem}" for problem in problems])
    return settings.validate(receiver_settings.Receiver, placed, source=name)


def _placed(tree: object, directory: Path, problems: list[str]) -> object:
    """Return the tree with full paths of secrets' files; add a problem for each refused secret."""
    if isinstance(tree, list):
        return [_placed(each, directory, problems) for each in tree]
    if not isinstance(tree, dict):
        return tree
    placed = {key: _placed(value, directory, problems) for key, value in tree.items()}
    file = tree.get("file")
    if "env" in tree or (isinstance(file, str) and (not file or "/" in file)):
        problems.append("a secret must be a file in the same directory: {file: NAME}")
    elif isinstance(file, str):
        placed["file"] = str(directory / file)
    return placed


@functools.lru_cache(1_000)
def _log(source: str, line: str) -> None:
    logs.logger().warning("import_difference", file=source, difference=line)


@functools.lru_cache(1_000)
def _log_loss(source: str, line: str) -> None:
    logs.logger().error("import_loss", file=source, loss=line)


class NoSecret(Exception):
    """A secret cannot be read; the message names the secret's location, but never its value."""


class SecretReader:
    """Reads secrets, and masks the secrets it has read in texts."""

    def __init__(self) -> None:
        self._read: list[str] = []

    def read(self, where: receiver_settings.Secret) -> str:
        """Return a secret. Raises NoSecret."""
        value = secret(where)
        self._read.append(value)
        return value

    def mask(self, text: str) -> str:
        """Return the text with secrets masked; a masked HTTP URL keeps its scheme and host."""
        shown = dict(part for value in self._read for part in _masked(value))
        for value in sorted(shown, key=len, reverse=True):
            if len(value) >= _MASKED_MIN:
                text = text.replace(value, shown[value])
        return text


def _masked(value: str) -> Iterator[tuple[str, str]]:
    """Yield a secret and the secret parts of a URL, each with the text to show instead."""
    scheme, _, rest = value.partition("://")
    place, _, path = rest.partition("/")
    login, _, host = place.rpartition("@")
    yield value, f"{scheme}://{host}/{_HIDDEN}" if scheme in _SCHEMES and path else _HIDDEN
    for part in (path, urllib.parse.unquote(path), login):
        yield part, _HIDDEN


def place(where: receiver_settings.Secret) -> str:
    """Return the location of a secret, as text for people."""
    if where.env is not None:
        return f"the variable {where.env}"
    return f"{where.file}{': ' + where.at if where.at else ''}"


def secret(where: receiver_settings.Secret) -> str:
    """Return a secret. Raises NoSecret."""
    if where.env is not None:
        value = os.environ.get(where.env, "").strip()
        if not value:
            raise NoSecret(f"the variable {where.env} is not set or is empty")
        return value
    assert where.file is not None, "a secret is in a file or in a variable"
    try:
        with Path(where.file).open("rb") as opened:
            text = opened.read(_SECRET_BYTES_MAX)
        value = (text.decode() if where.at is None else _inside(text, where.at)).strip()
    except OSError as error:
        raise NoSecret(f"{where.file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NoSecret(f"{where.file}: not UTF-8 text") from None
    if not value:
        raise NoSecret(f"{place(where)}: {'missing or empty' if where.at else 'empty'}")
    return value


def _inside(text: bytes, at: str) -> str:
    """Return the text at the path `at` in a YAML file; empty if there is none or it is not YAML."""
    try:
        branch: object
        (branch,) = settings.parse(text, source=at)
        for key in at.split("."):
            branch = (
                msgspec.convert(branch, list[object])[int(key)]
                if key.isdigit()
                else msgspec.convert(branch, dict[str, object])[key]
            )
        return msgspec.convert(branch, str)
    except settings.UNREADABLE:
        return ""
