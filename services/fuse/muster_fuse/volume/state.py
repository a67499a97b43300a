"""Adapter for files: records in the state directory which pods have volumes, for restarts."""

import os
import re
from pathlib import Path
from typing import Final

import msgspec

from muster import codec
from muster_fuse.request import caller
from muster_fuse.volume import publication

_TEXT_BYTES_MAX: Final = 65_536
_NEW: Final = ".new"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pod, and the kubelet's directory for each of its volumes, by volume id."""

    pod: caller.Pod
    volumes: dict[str, str]


class Records:
    """The records, one file per pod; files are replaced atomically."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def load(self) -> tuple[dict[str, Record], list[str]]:
        """Return the records by pod uid, and the problems of unreadable files. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        records, problems = {}, []
        for path in sorted(self._directory.iterdir()):
            if path.name.endswith(_NEW):
                path.unlink(missing_ok=True)
                continue
            try:
                records[path.stem] = _read(path)
            except (OSError, ValueError, *codec.UNREADABLE) as error:
                problems.append(f"{path}: {error}")
        return records, problems

    def save(self, record: Record) -> None:
        """Write the record of a pod. Raises OSError."""
        path = self._path(record.pod.uid)
        new = path.with_name(f"{path.name}{_NEW}")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def forget(self, uid: str) -> None:
        """Remove the record of a pod, if there is one. Raises OSError."""
        self._path(uid).unlink(missing_ok=True)

    def _path(self, uid: str) -> Path:
        assert re.fullmatch(publication.UID_PATTERN, uid), "uids are checked on arrival"
        return self._directory / f"{uid}.json"


def _read(path: Path) -> Record:
    """Return the record in a file. Raises OSError, ValueError or one of codec.UNREADABLE."""
    if not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        text = file.read(_TEXT_BYTES_MAX + 1)
    if len(text) > _TEXT_BYTES_MAX:
        raise ValueError(f"longer than {_TEXT_BYTES_MAX} bytes")
    record = msgspec.json.decode(text, type=Record)
    if not re.fullmatch(publication.UID_PATTERN, record.pod.uid):
        raise ValueError("contains no valid pod uid")
    if path.name != f"{record.pod.uid}.json":
        raise ValueError(f"contains the record of another pod, {record.pod.uid}")
    return record
