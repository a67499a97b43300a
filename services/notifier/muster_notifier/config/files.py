"""Adapter: reads configuration files: the notifier's own, or an Alertmanager's."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from muster.service import logs, settings
from muster_notifier.config import alertmanager_importer, schema

PREFIX: Final = "MUSTER_NOTIFIER"


def alertmanager(text: bytes, source: str) -> dict[str, Any]:
    """Return an Alertmanager's file as a tree of ours; what is left out is logged, once.

    Raises BadSettings.
    """
    tree, left_out = translate(text, source)
    for line in left_out:
        _log(source, line)
    return tree


def translate(text: bytes, source: str) -> tuple[dict[str, Any], list[str]]:
    """Return an Alertmanager's file as a tree of ours, and a line for everything left out."""
    documents = settings.parse(text, source=source)
    importer = alertmanager_importer.Importer(str(Path(source).absolute()))
    try:
        tree = importer.read(documents[0] if documents else {})
    except alertmanager_importer.Unreadable as error:
        raise settings.BadSettings([f"{source}: {error}"]) from None
    return tree, importer.left_out


FORMATS: Final[Mapping[str, settings.Foreign]] = {"alertmanager": alertmanager}


def read(file: Path, *, written_for: str, environment: Mapping[str, str]) -> schema.Settings:
    """Return the settings in a file. Raises BadSettings."""
    return settings.load(
        schema.Settings,
        prefix=PREFIX,
        file=file,
        environment=environment,
        foreign=FORMATS.get(written_for),
    )


@functools.lru_cache(1_000)
def _log(source: str, line: str) -> None:
    logs.logger().warning("imported_differs", file=source, difference=line)
