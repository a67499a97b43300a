"""Adapter: the entry points of the installed commands; each reports missing extras."""

import contextlib
import getpass
import importlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shlex
import sys
import urllib.parse
from pathlib import Path
from typing import Final

from muster import escaping

_NEEDS: Final = {
    "auth": ("cryptography",),
    "cli": ("cyclopts", "rich", "textual"),
    "console": ("aiohttp", "cryptography", "jinja2", "jwt", "starlette", "uvicorn"),
    "fuse": ("google.protobuf", "grpc"),
    "fuse-webhook": ("aiohttp", "cryptography", "kubernetes"),
    "labeler": ("kubernetes",),
    "local": ("aiohttp", "google.protobuf", "grpc"),
    "notifier": ("aiohttp", "aiosmtplib"),
    "plugin": ("google.protobuf", "grpc"),
}
"""The modules that each extra provides; pyproject.toml lists the distributions."""


def muster() -> int:
    """Run the command `muster`."""
    return _run("muster", "cli", "muster.cli.__main__")


def plugin() -> int:
    """Run the plugin."""
    return _run("muster-plugin", "plugin", "muster_plugin.__main__")


def labeler() -> int:
    """Run the labeler."""
    return _run("muster-labeler", "labeler", "muster_labeler.__main__")


def health() -> int:
    """Run the health service."""
    return _run("muster-health", "health", "muster_health.__main__")


def notifier() -> int:
    """Run the notifier."""
    return _run("muster-notifier", "notifier", "muster_notifier.__main__")


def gate() -> int:
    """Run the gate."""
    return _run("muster-gate", "auth", "muster_gate.__main__")


def console() -> int:
    """Run the console."""
    return _run("muster-console", "console", "muster_console.__main__")


def fuse_webhook() -> int:
    """Run the admission webhook of the FUSE broker."""
    return _run("muster-fuse-webhook", "fuse-webhook", "muster_fuse.admission.__main__")


def fuse() -> int:
    """Run the FUSE broker."""
    return _run("muster-fuse", "fuse", "muster_fuse.__main__")


def missing(*extras: str) -> str | None:
    """Return a message if any of the extras is not installed; otherwise None."""
    absent = [e for e in extras if not all(_is_there(m) for m in _NEEDS.get(e, ()))]
    if not absent:
        return None
    return f"required packages are not installed: run {how_to_install(*absent)}"


def how_to_install(*extras: str) -> str:
    """Return a pip command that installs extras, from the source of this installation if known."""
    names = ",".join(extras)
    origin = _origin()
    if origin is None:
        return (
            f"pip install '.[{names}]' in muster's source tree, or pip install 'FILE.whl[{names}]' "
            "if you have a wheel"
        )
    return f"pip install {origin.replace('[]', f'[{names}]')}"


def _origin() -> str | None:
    """Return pip's arguments for muster's source (PEP 610), with `[]` in place of the extras.

    Returns None if no source is recorded, or if its files no longer exist.
    """
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, ValueError, KeyError):
        text = importlib.metadata.distribution("muster-k8s").read_text("direct_url.json")
        origin = json.loads(text or "{}")
        url = urllib.parse.urlsplit(origin["url"])
        path = urllib.parse.unquote(url.path)
        if url.scheme != "file":
            versioned = origin.get("vcs_info", {})
            place = f"{versioned['vcs']}+{origin['url']}" if versioned else origin["url"]
            return shlex.quote(f"muster-k8s[] @ {place}")
        if Path(path).exists():
            is_editable = origin.get("dir_info", {}).get("editable")
            return f"{'-e ' if is_editable else ''}{shlex.quote(f'{path}[]')}"
    return None


def _run(command: str, extra: str, module: str) -> int:
    _open_missing_streams()
    _escape_stderr()
    problem = missing(extra)
    if problem:
        sys.stderr.write(f"{command}: {problem}\n")
        return 1
    try:
        return int(importlib.import_module(module).main())
    except KeyboardInterrupt:
        return 130


def _open_missing_streams() -> None:
    """Open /dev/null for each standard stream that the caller has closed.

    Python sets such a stream to None, and the next file or socket would get its descriptor number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  # until the end


class _Escaped(io.TextIOWrapper):
    """Standard error without control characters, which texts quoted in tracebacks may contain."""

    def write(self, text: str) -> int:
        """Write a text; unprintable characters other than line feeds and tabs are replaced."""
        super().write(escaping.plain(text, keep="\n\t"))
        return len(text)

    def close(self) -> None:
        """Flush, but close nothing: the buffer belongs to `sys.__stderr__`."""
        self.flush()


def _escape_stderr() -> None:
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _Escaped(sys.stderr.buffer, "utf-8", "backslashreplace", write_through=True)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is absent
        return False


def user_name() -> str:
    """Return the user's name, or `user UID` if the user has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
