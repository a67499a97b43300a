"""Adapter: a directory of keys: the operator's, the accounts', each role's, and derived files.

A `.seed` file has one seed a line, the newest first: while a key is changed both are valid. All
else is derived from the seeds: accounts.conf for nats-server, credentials, the gate's keys.
"""

import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from muster.nats.auth import accounts, nkeys

ANSWER: Final = "answer"
CHANGEABLE: Final = (ANSWER, *accounts.Role)
"""The keys that sign every day; the others sign these."""
_KINDS: Final[dict[str, nkeys.Kind]] = {
    "operator": nkeys.Kind.OPERATOR,
    "system": nkeys.Kind.ACCOUNT,
    "auth": nkeys.Kind.ACCOUNT,
    "muster": nkeys.Kind.ACCOUNT,
    "plugins": nkeys.Kind.ACCOUNT,
    "gate": nkeys.Kind.USER,
    ANSWER: nkeys.Kind.ACCOUNT,
    **{role.value: nkeys.Kind.ACCOUNT for role in accounts.Role},
}
_OTHERS_WRITE: Final = 0o022


class BadDirectory(Exception):
    """The directory cannot be used; the text says why."""


def make(directory: Path, *, at: float) -> list[str]:
    """Make all keys and the derived files; return the files' names. Raises BadDirectory."""
    try:
        own(directory)
        # new keys, made by mistake, would lock everybody out
        if any(directory.glob("*.seed")):
            raise BadDirectory(
                f"{directory}: has keys already; change one with `muster auth rotate`"
            )
        for name, kind in _KINDS.items():
            write(directory / f"{name}.seed", f"{_new(kind).seed}\n")
        return derive(directory, at=at)
    except OSError as error:
        raise BadDirectory(f"{error.filename or directory}: {error.strerror or error}") from None


def own(directory: Path) -> None:
    """Make a directory that only we can write to. Raises BadDirectory, OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if stat.S_IMODE(directory.stat().st_mode) & _OTHERS_WRITE:
        raise BadDirectory(f"{directory}: others can write into it: chmod 700 it, or name another")
    if not any(directory.iterdir()):
        directory.chmod(0o700)


def derive(directory: Path, *, at: float) -> list[str]:
    """Write accounts.conf, the credentials of each service and the gate's files; return the names.

    Raises BadDirectory.
    """
    auth, gate, plugins = (_newest(directory, name) for name in ("auth", "gate", "plugins"))
    keys = accounts.Keys(
        operator=_newest(directory, "operator"),
        system=_newest(directory, "system"),
        auth=auth,
        muster=_newest(directory, "muster"),
        plugins=plugins,
        gate=gate.public,
        answers=[key.public for key in _keys(directory, ANSWER)],
        roles={r: [key.public for key in _keys(directory, r)] for r in accounts.Role},
    )
    signing = {
        "auth": auth.public,
        "plugins": plugins.public,
        "answer_seed": _newest(directory, ANSWER).seed,
        "node_seed": _newest(directory, accounts.Role.NODE).seed,
    }
    gate_jwt = nkeys.encode_jwt(accounts.gate_user(gate.public), auth, at=at)
    made = {
        "accounts.conf": accounts.configuration(keys, _new(nkeys.Kind.USER).public, at=at),
        "gate.json": msgspec.json.encode(signing).decode() + "\n",
        "gate.creds": nkeys.write_creds(gate_jwt, gate),
    }
    for role in accounts.CENTRAL:
        made[f"{role}.creds"] = user(directory, role, name=role, at=at)
    try:
        for name, text in made.items():
            write(directory / name, text)
    except OSError as error:
        raise BadDirectory(f"{error.filename}: {error.strerror or error}") from None
    return list(made)


def user(
    directory: Path, role: accounts.Role, *, name: str, at: float, until: float | None = None
) -> str:
    """Return the credentials of a new user. Raises BadDirectory."""
    key = _new(nkeys.Kind.USER)
    owner = "plugins" if role is accounts.Role.NODE else "muster"
    account = _newest(directory, owner).public
    claims = accounts.user(role, key.public, name=name, account=account, until=until)
    return nkeys.write_creds(nkeys.encode_jwt(claims, _newest(directory, role), at=at), key)


def rotate(directory: Path, name: str, *, at: float) -> list[str]:
    """Sign with a new key from now on, and keep the old one valid; return the files' names.

    Raises BadDirectory.
    """
    seeds = [key.seed for key in _keys(directory, name)]
    _put(directory, name, [_new(_KINDS[name]).seed, *seeds])
    return derive(directory, at=at)


def drop(directory: Path, name: str, *, at: float) -> list[str]:
    """Drop all but the newest key; return the files' names. Raises BadDirectory."""
    _put(directory, name, [_newest(directory, name).seed])
    return derive(directory, at=at)


def write(file: Path, text: str) -> None:
    """Write a secret that nobody else can read; a crash leaves the old one or the new one.

    Raises OSError.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as written:
        written.write(text)
    beside.replace(file)


def _put(directory: Path, name: str, seeds: Sequence[str]) -> None:
    try:
        write(directory / f"{name}.seed", "".join(f"{seed}\n" for seed in seeds))
    except OSError as error:
        raise BadDirectory(f"{error.filename}: {error.strerror or error}") from None


def _newest(directory: Path, name: str) -> nkeys.Key:
    return _keys(directory, name)[0]


def _keys(directory: Path, name: str) -> list[nkeys.Key]:
    file = directory / f"{name}.seed"
    try:
        seeds = file.read_text("ascii").split()
        keys = [nkeys.Key.from_seed(seed, _KINDS[name]) for seed in seeds]
    except FileNotFoundError:
        raise BadDirectory(
            f"{file}: not there; make all keys with `muster auth init {directory}`"
        ) from None
    except OSError as error:
        raise BadDirectory(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise BadDirectory(f"{file}: {error}") from None
    if not keys:
        raise BadDirectory(f"{file}: empty")
    return keys


def _new(kind: nkeys.Kind) -> nkeys.Key:
    return nkeys.Key(kind, secrets.token_bytes(nkeys.SECRET_BYTES))
