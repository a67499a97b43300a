"""Adapter for files and the Kubernetes API: writes the archive for a bug report (`--bundle`).

All its content passes through `redaction`. Values of environment variables, Secrets and arguments
are never included.
"""

import asyncio
import io
import os
import platform
import stat
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

import muster
from muster import escaping
from muster.cli import doctor_observer, redaction, status
from muster.cli.doctor_facts import NotSeen, Observations
from muster.fleet import health_state
from muster.kubernetes import installation
from muster.service import settings

if TYPE_CHECKING:
    from muster.cli import cluster as clusters

LINES_MAX: Final = 500
"""The maximum number of lines of each log."""
_LOG_BYTES_MAX: Final = 256 * 1024
_FILE_BYTES_MAX: Final = 4 * 1024 * 1024
_BYTES_MAX: Final = 32 * 1024 * 1024
_PODS_MAX: Final = 50
_AT_ONCE: Final = 8
_ROOT: Final = "muster-doctor"


class Bundle:
    """The files of an archive, without secrets; `known` are values known to be secret."""

    def __init__(self, known: Sequence[str]) -> None:
        self._redaction = redaction.Redaction(known)
        self._files: dict[str, bytes] = {}
        self._left = _BYTES_MAX
        self.notes: list[str] = []
        """What is missing in the archive, and why."""

    def add_text(self, name: str, text: str) -> None:
        """Add a text; if it is too long, add only its end."""
        content = self._redaction.text(text).encode("utf-8", "replace")
        if len(content) > _FILE_BYTES_MAX:
            # start at the next line: a partial line may contain part of a secret, unrecognised
            content = content[-_FILE_BYTES_MAX:].partition(b"\n")[2]
        self._add(name, content)

    def add_tree(self, name: str, tree: object) -> None:
        """Add a tree as JSON."""
        clean = self._redaction.tree(msgspec.to_builtins(tree))
        self._add(name, f"{escaping.json_of(clean, indent=2)}\n".encode("utf-8", "replace"))

    def archive(self) -> bytes:
        """Return the archive."""
        self.add_text("not-included.txt", "".join(f"{note}\n" for note in self.notes))
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w:gz") as archive:
            for name, content in sorted(self._files.items()):
                entry = tarfile.TarInfo(f"{_ROOT}/{name}")
                entry.size, entry.mode, entry.mtime = len(content), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(content))
        return written.getvalue()

    async def collect(self, observer: doctor_observer.Observer, observed: Observations) -> None:
        """Add versions, streams, consumers, status, and a cluster's pods, logs and settings."""
        versions = {} if isinstance(observed.versions, NotSeen) else observed.versions
        command = {"muster": muster.__version__, "python": platform.python_version()}
        self.add_tree("versions.json", {"command": command, "processes": versions})
        self.add_tree(
            "bus.json",
            {"streams": _or_reason(observed.stores), "consumers": _or_reason(observed.consumers)},
        )
        if isinstance(observed.health, health_state.State):
            summary = status.summary(observed.health, source=observer.source, everything=False)
            self.add_tree("status.json", summary)
        else:
            self.notes.append(f"status.json: {observed.health.why}")
        if isinstance(observed.pods, NotSeen):
            self.notes.append(f"pods.json, logs, settings: {observed.pods.why}")
            return
        self.add_tree("pods.json", [_description(pod) for pod in observed.pods])
        assert observer.cluster is not None, "pods were observed, so there is a cluster"
        observer.go_on()
        await self._add_logs(observer, observer.cluster, observed.pods)
        await self._add_settings(observer, observer.cluster, observed.pods)

    def _add(self, name: str, content: bytes) -> None:
        if len(content) > min(self._left, _FILE_BYTES_MAX):
            self.notes.append(f"{name}: too large, {len(content)} bytes")
            return
        self._left -= len(content)
        self._files[name] = content

    async def _add_logs(
        self,
        observer: doctor_observer.Observer,
        cluster: "clusters.Cluster",
        pods: Sequence[installation.Pod],
    ) -> None:
        # pods that are not ready come first
        chosen = sorted(pods, key=lambda pod: (pod.is_ready, -pod.restarts, pod.name))
        if len(chosen) > _PODS_MAX:
            self.notes.append(f"logs: included for only {_PODS_MAX} of {len(chosen)} pods")
        wanted = [
            (pod, container, is_previous)
            for pod in chosen[:_PODS_MAX]
            for container in pod.containers
            for is_previous in ((False, True) if pod.restarts else (False,))
        ]
        for start in range(0, len(wanted), _AT_ONCE):
            some = wanted[start : start + _AT_ONCE]
            progress = f"logs, {start + 1} of {len(wanted)}"
            reads = (
                observer.look(
                    progress,
                    cluster.log(
                        pod,
                        container,
                        is_previous=is_previous,
                        lines=LINES_MAX,
                        bytes_max=_LOG_BYTES_MAX,
                    ),
                )
                for pod, container, is_previous in some
            )
            texts = await asyncio.gather(*reads)
            for (pod, container, is_previous), text in zip(some, texts, strict=True):
                name = f"logs/{pod.name}/{container}{'.previous' if is_previous else ''}.log"
                if isinstance(text, NotSeen):
                    self.notes.append(f"{name}: {text.why}")
                else:
                    self.add_text(name, text)

    async def _add_settings(
        self,
        observer: doctor_observer.Observer,
        cluster: "clusters.Cluster",
        pods: Sequence[installation.Pod],
    ) -> None:
        for name in sorted({name for pod in pods for name in pod.config_maps}):
            content = await observer.look(f"settings {name}", cluster.config_map(name))
            if isinstance(content, NotSeen):
                self.notes.append(f"settings/{name}: {content.why}")
                continue
            for key, text in sorted(content.items()):
                self._add_setting(f"settings/{name}/{key}", text)

    def _add_setting(self, name: str, text: str) -> None:
        if not name.endswith((".yaml", ".yml", ".json")):
            self.add_text(name, text)
            return
        try:
            trees = settings.parse(text.encode("utf-8", "replace"), source=name)
        except settings.BadSettings:
            # the error itself would quote the text
            self.notes.append(f"{name}: not valid YAML")
            return
        self.add_tree(name, trees[0] if len(trees) == 1 else trees)


class Refused(Exception):
    """The archive cannot be written; the text is the reason."""


def check(file: Path, *, force: bool) -> None:
    """Raise Refused if the archive cannot be written to this file."""
    try:
        if not _is_directory(file.parent):
            raise Refused(f"the directory {file.parent} does not exist")
        if _is_directory(file):
            raise Refused(f"{file} is a directory")
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}") from None
    if not force and os.path.lexists(file):
        raise Refused(f"{file} exists; --force overwrites it")


def write(file: Path, content: bytes, *, force: bool) -> None:
    """Write a file that only its owner can read; a failure leaves no part of it. Raises Refused."""
    check(file, force=force)
    place = file.with_name(f".{file.name}.{os.getpid()}") if force else file
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
            place.replace(file)
        except OSError:
            place.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise Refused(f"{file}: {error.strerror or error}") from None


def _is_directory(path: Path) -> bool:
    """Return whether a path is a directory. Raises OSError if that cannot be determined.

    `Path.is_dir` does so only before Python 3.14.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _or_reason(observed: object) -> object:
    """Return an observation, or the reason why it is missing."""
    return {"not_checked": observed.why} if isinstance(observed, NotSeen) else observed


def _description(pod: installation.Pod) -> dict[str, object]:
    """Return some of a pod's fields, including its status; of variables, only the names."""
    return {
        "name": pod.name,
        "part": pod.part,
        "node": pod.spec.node_name,
        "created": pod.metadata.creation_timestamp,
        "ready": pod.is_ready,
        "reason": pod.reason,
        "restarts": pod.restarts,
        "containers": [
            {
                "name": container.name,
                "image": container.image,
                "variables": [variable.name for variable in container.env or ()],
            }
            for container in pod.spec.containers or ()
        ],
        "status": pod.status,
    }
