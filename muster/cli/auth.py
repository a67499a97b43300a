"""Door to people: `muster auth`, the keys and credentials of the bus."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

from muster import commands

auth = cyclopts.App(name="auth", help="Make and change the keys and credentials of the bus.")

_UNITS: Final = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800, "y": 31_536_000}
_VALID_MAX_S: Final = 10 * _UNITS["y"]
_HOSTS: Final = ("localhost", "127.0.0.1", "::1", "muster-nats", "*.muster-nats")
_IN_CLUSTER: Final = ("muster-nats.muster", "*.muster-nats.muster.svc.cluster.local")
_Keys = Annotated[Path, Parameter(name=["--keys", "-k"], env_var="MUSTER_AUTH_KEYS")]
_SECRETS: Final = """\
Keep {directory} where only you can read it. What the cluster gets of it, the first time and
whenever it has changed:

into() {{ kubectl -n muster create "$@" --dry-run=client -o yaml | kubectl apply -f -; }}
into configmap muster-accounts --from-file={directory}/accounts.conf
into secret generic muster-gate --from-file={directory}/gate.json --from-file={directory}/gate.creds
for who in health labeler notifier; do
  into secret generic muster-$who-creds --from-file=nats.creds={directory}/$who.creds
done"""
_SUBSCRIBER: Final = """\
# NATS_CREDS={creds} python this.py   (pip install 'muster-k8s[auth]')
import asyncio, muster
async def main():
    async for event in muster.events("*", url="{url}"):
        print(event, flush=True)
asyncio.run(main())"""


def register(app: cyclopts.App) -> None:
    """Add the command."""
    app.command(auth)


@auth.command
def init(directory: Path) -> int:
    """Make the keys of an installation, accounts.conf for NATS, and each service's credentials.

    Parameters
    ----------
    directory
        Where to; it must not hold keys yet.

    """

    def made() -> list[str]:
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports

        names = keyfiles.make(directory, at=time.time())
        return [_wrote(directory, names), "", _SECRETS.format(directory=directory)]

    return _run("init", made)


@auth.command
def accounts(*, keys: _Keys = Path("muster-keys")) -> int:
    """Make accounts.conf and the services' credentials anew from the keys, as after an upgrade.

    Parameters
    ----------
    keys
        The directory that `muster auth init` made.

    """

    def made() -> list[str]:
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports

        names = keyfiles.derive(keys, at=time.time())
        return [_wrote(keys, names), "", _SECRETS.format(directory=keys)]

    return _run("accounts", made)


@auth.command
def node(node: str, *, valid: str | None = None, keys: _Keys = Path("muster-keys")) -> int:
    """Print credentials for the plugins on one node, where nodes have no tokens to show.

    Parameters
    ----------
    node
        Its name.
    valid
        For how long: `30d`, `1y`; for ever, until the key is changed, if not said.
    keys
        The directory that `muster auth init` made.

    """

    def made() -> list[str]:
        from muster import accounts, permissions, vocabulary  # noqa: PLC0415  # as above
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports

        name = permissions.plugin(vocabulary.node_token(node)).user
        at = time.time()
        role = accounts.Role.NODE
        return [keyfiles.user(keys, role, name=name, at=at, until=_until(valid, at))]

    return _run("node", made)


@auth.command
def reader(
    *,
    name: str,
    valid: str | None = None,
    out: Path | None = None,
    url: str = "tls://muster-nats.muster:4222",
    keys: _Keys = Path("muster-keys"),
) -> int:
    """Print credentials for an outside tool that listens, and a program that does.

    Parameters
    ----------
    name
        Whose they are: letters, digits, `-` and `_`.
    valid
        For how long: `30d`, `1y`; for ever, until the key is changed, if not said.
    out
        A file to write the credentials to instead.
    url
        Where NATS is, for the program.
    keys
        The directory that `muster auth init` made.

    """

    def made() -> list[str]:
        from muster import accounts, permissions  # noqa: PLC0415  # as above
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports

        if not name:
            raise ValueError("--name: empty")
        user, at = permissions.reader(name).user, time.time()
        text = keyfiles.user(keys, accounts.Role.READER, name=user, at=at, until=_until(valid, at))
        file = out or Path(f"{name}.creds")
        program = _SUBSCRIBER.format(creds=file, url=url)
        if out is None:
            return [text, program]
        out.touch(mode=0o600)
        out.write_text(text)
        return [program]

    return _run("reader", made)


@auth.command
def rotate(
    key: str,
    *,
    drop: Annotated[bool, Parameter(negative="")] = False,
    keys: _Keys = Path("muster-keys"),
) -> int:
    """Change a key that signs: first both are good, and after --drop only the new one.

    Parameters
    ----------
    key
        `answer`, `node`, `reader`, `health`, `labeler`, `notifier` or `admin`.
    drop
        End what the old key signed, once everybody has credentials of the new one.
    keys
        The directory that `muster auth init` made.

    """

    def made() -> list[str]:
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports

        if key not in keyfiles.CHANGEABLE:
            raise ValueError(f"{key!r} is none of {', '.join(keyfiles.CHANGEABLE)}")
        change = keyfiles.drop if drop else keyfiles.rotate
        then = (
            f"give NATS the new accounts.conf; what the old key of {key} signed is then refused"
            if drop
            else f"give NATS the new accounts.conf first, then {_whom(key)}; then: "
            f"muster auth rotate {key} --drop"
        )
        return [_wrote(keys, change(keys, key, at=time.time())), then]

    return _run("rotate", made)


@auth.command
def local_ca(directory: Path, *, host: tuple[str, ...] = (), valid: str = "1y") -> int:
    """Make an authority of one's own, and a certificate for NATS: ca.crt, tls.crt, tls.key.

    Parameters
    ----------
    directory
        Where to.
    host
        Another name or address of NATS; this machine's and those in the cluster are always in.
    valid
        For how long.

    """

    def made() -> list[str]:
        from muster.cli import certificates  # noqa: PLC0415  # a command pays for its own imports

        at = datetime.now(UTC)
        lasts = timedelta(seconds=_lasts(valid))
        hosts = list(dict.fromkeys((*_HOSTS, *_IN_CLUSTER, *host)))
        names = certificates.make(directory, hosts, at=at, lasts=lasts)
        return [
            _wrote(directory, names),
            f"clients: NATS_CA={directory / 'ca.crt'}; in a cluster:",
            "kubectl -n muster create secret generic muster-nats-tls "
            + " ".join(f"--from-file={directory}/{name}" for name in names),
        ]

    return _run("local-ca", made)


def _run(command: str, made: Callable[[], Sequence[str]]) -> int:
    problem = commands.missing("auth")
    if problem is not None:
        print(f"muster auth {command}: {problem}", file=sys.stderr)
        return 1
    from muster.cli import keyfiles  # noqa: PLC0415  # needs the extra

    try:
        print("\n".join(made()))
    except (ValueError, keyfiles.BadDirectory) as error:
        print(f"muster auth {command}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"muster auth {command}: {where}{error.strerror or error}", file=sys.stderr)
        return 2
    return 0


def _whom(key: str) -> str:
    if key == "answer":
        return "the gate gate.json"
    if key == "node":
        return "the gate gate.json, and nodes with credentials new ones"
    return "readers new credentials" if key == "reader" else f"its new {key}.creds"


def _wrote(directory: Path, names: Sequence[str]) -> str:
    return f"wrote {', '.join(names)} in {directory}"


def _until(valid: str | None, at: float) -> float | None:
    return None if valid is None else at + _lasts(valid)


def _lasts(text: str) -> int:
    """Return seconds. Raises ValueError."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([mhdwy])", text)
    lasts = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < lasts <= _VALID_MAX_S:
        raise ValueError(f"--valid: {text!r} is not like 12h, 30d or 1y, and at most 10y")
    return lasts
