"""Adapter: people: `muster auth`, the keys and credentials of the bus."""

import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Sequence
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
_BY_HAND: Final = {
    "node": "give nodes that have credentials new ones: muster auth node",
    "reader": "give readers new credentials: muster auth reader",
}
"""What no command can bring to where it is needed."""
_Keys = Annotated[Path, Parameter(name=["--keys", "-k"], env_var="MUSTER_AUTH_KEYS")]
_KEYS: Final = Path("muster-keys")
_Out = Annotated[Path | None, Parameter(name=["--out", "-o"])]


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

        if directory == Path():
            raise ValueError("name a directory of its own for the keys")
        return [
            _wrote(directory, keyfiles.make(directory, at=time.time())),
            f"Keep {directory} where only you can read it. What the cluster gets of it:\n",
            *first(str(directory)),
        ]

    return _run("init", made)


@auth.command
def accounts(*, keys: _Keys = _KEYS) -> int:
    """Make accounts.conf and the services' credentials anew from the keys, as after an upgrade.

    Parameters
    ----------
    keys
        The directory that `muster auth init` made.

    """

    def made() -> list[str]:
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports

        wrote = _wrote(keys, keyfiles.derive(keys, at=time.time()))
        return [f"{wrote}\n", *again(str(keys))]

    return _run("accounts", made)


@auth.command
def node(node: str, *, valid: str | None = None, out: _Out = None, keys: _Keys = _KEYS) -> int:
    """Print credentials for the plugins on one node, where nodes have no tokens to show.

    Parameters
    ----------
    node
        Its name.
    valid
        For how long: `30d`, `1y`; for ever, until the key is changed, if not said.
    out
        A file to write the credentials to instead, which nobody else can read.
    keys
        The directory that `muster auth init` made.

    """

    def made() -> list[str]:
        from muster import vocabulary  # noqa: PLC0415  # as above
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports
        from muster.nats.auth import accounts, permissions  # noqa: PLC0415  # as above

        name = permissions.plugin(vocabulary.node_token(node)).user
        at = time.time()
        role = accounts.Role.NODE
        text = keyfiles.user(keys, role, name=name, at=at, until=_until(valid, at))
        return _given(text, out)

    return _run("node", made)


@auth.command
def reader(
    *,
    name: str,
    valid: str | None = None,
    out: _Out = None,
    url: str = "tls://muster-nats.muster:4222",
    keys: _Keys = _KEYS,
) -> int:
    """Print credentials for an outside tool that listens, and a program that does.

    Parameters
    ----------
    name
        Whose they are: letters, digits, `-` and `_`.
    valid
        For how long: `30d`, `1y`; for ever, until the key is changed, if not said.
    out
        A file to write the credentials to instead, which nobody else can read.
    url
        Where NATS is, for the program.
    keys
        The directory that `muster auth init` made.

    """

    def made() -> list[str]:
        from muster.cli import keyfiles  # noqa: PLC0415  # a command pays for its own imports
        from muster.nats.auth import accounts, permissions  # noqa: PLC0415  # as above

        if not name:
            raise ValueError("--name: empty")
        user, at = permissions.reader(name).user, time.time()
        text = keyfiles.user(keys, accounts.Role.READER, name=user, at=at, until=_until(valid, at))
        file = out or Path(f"{name}.creds")
        return [*_given(text, out), *subscriber(str(file), url)]

    return _run("reader", made)


@auth.command
def rotate(
    key: str,
    *,
    drop: Annotated[bool, Parameter(negative="")] = False,
    keys: _Keys = _KEYS,
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
        if drop:
            wrote = _wrote(keys, keyfiles.drop(keys, key, at=time.time()))
            then = f"Once NATS has it, what the old key of {key} signed is refused:\n"
            return [wrote, then, *dropped(str(keys))]
        wrote = _wrote(keys, keyfiles.rotate(keys, key, at=time.time()))
        where = "" if keys == _KEYS else f" --keys {shlex.quote(str(keys))}"
        told = [f"Both keys of {key} are good, once NATS has it:\n"]
        told += again(str(keys), key=key)
        if key in _BY_HAND:
            told.append(f"\nThen {_BY_HAND[key]}.")
        return [wrote, *told, f"\nAt last: muster auth rotate {key} --drop{where}"]

    return _run("rotate", made)


@auth.command
def local_ca(
    directory: Path,
    *,
    host: tuple[str, ...] = (),
    valid: str = "10y",
    renew: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Make an authority of one's own, and a certificate for NATS: ca.crt, tls.crt, tls.key.

    Parameters
    ----------
    directory
        Where to.
    host
        Another name or address of NATS; this machine's and those in the cluster are always in.
    valid
        For how long the certificate is good; the authority is for 20 years.
    renew
        Make a new certificate by the authority that is there; clients notice nothing.

    """

    def made() -> list[str]:
        from muster.cli import certificates  # noqa: PLC0415  # a command pays for its own imports

        if directory == Path():
            raise ValueError("name a directory of its own for the certificates")
        at = datetime.now(UTC)
        lasts = timedelta(seconds=_lasts(valid))
        hosts = list(dict.fromkeys((*_HOSTS, *_IN_CLUSTER, *host)))
        change = certificates.renew if renew else certificates.make
        names = change(directory, hosts, at=at, lasts=lasts)
        told = renewed if renew else tls
        return [
            f"{_wrote(directory, names)}; the certificate is good until {at + lasts:%Y-%m-%d}",
            f"ca.key stays with you. Clients: NATS_CA={directory / 'ca.crt'}. In a cluster:\n",
            *told(str(directory)),
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


def _given(text: str, out: Path | None) -> list[str]:
    """Return what is printed of a secret: nothing, if it goes to a file."""
    from muster.cli import keyfiles  # noqa: PLC0415  # needs the extra

    if out is None:
        return [text]
    if out.exists() and not out.is_file():
        raise ValueError(f"--out: {out} is no file")
    keyfiles.write(out, text)
    return []


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


SERVICES: Final = ("health", "labeler", "notifier")
"""Who in the cluster shows credentials of its own."""

_KUBECTL: Final = "kubectl -n muster"
_INTO: Final = f'into() {{ {_KUBECTL} create "$@" --dry-run=client -o yaml | kubectl apply -f -; }}'
# nats-server reads accounts.conf and certificates when it starts
_RESTART: Final = (
    f"{_KUBECTL} rollout restart statefulset/muster-nats",
    f"{_KUBECTL} rollout status statefulset/muster-nats",
)
_AUTHORITY: Final = (
    f"# ca.crt: {_KUBECTL} get configmap muster-nats-ca -o 'jsonpath={{.data.ca\\.crt}}' > ca.crt"
)
_INSTALL: Final = "# needs, in the folder of muster's repository: pip install '.[auth]'"
_PROGRAM: Final = """\
import asyncio, muster
async def main():
    async for event in muster.events("*", url="{url}"):
        print(event, flush=True)
asyncio.run(main())"""


def first(directory: str) -> list[str]:
    """Return what the cluster gets before NATS runs in it."""
    return [_INTO, _accounts(directory), _gate(directory), *_services(directory, SERVICES)]


def again(directory: str, *, key: str | None = None) -> list[str]:
    """Return what the cluster gets when keys or permissions changed, or only one `key`: NATS first.

    Whoever shows what NATS does not know yet is refused.
    """
    changed = SERVICES if key is None else tuple({key}.intersection(SERVICES))
    gate = [_gate(directory)] if key in {None, "answer", "node"} else []
    return [_INTO, _accounts(directory), *_RESTART, *gate, *_services(directory, changed)]


def dropped(directory: str) -> list[str]:
    """Return what the cluster gets when an old key is to end."""
    return [_INTO, _accounts(directory), *_RESTART]


def tls(directory: str) -> list[str]:
    """Return how an authority, a certificate and its key come into the cluster.

    The key is in a Secret that only NATS refers to: a node may read whatever its pods refer to.
    """
    files = " ".join(_file(directory, name) for name in ("tls.crt", "tls.key", "ca.crt"))
    return [
        _INTO,
        f"into secret generic muster-nats-tls {files}",
        f"into configmap muster-nats-ca {_file(directory, 'ca.crt')}",
    ]


def renewed(directory: str) -> list[str]:
    """Return how a new certificate takes the place of the old one, the authority being the same."""
    return [*tls(directory), *_RESTART]


def subscriber(creds: str, url: str) -> list[str]:
    """Return a program that listens with these credentials, and how it is run."""
    variables = [f"NATS_CREDS={shlex.quote(creds)}"]
    if url.startswith("tls:"):
        variables.append("NATS_CA=ca.crt")
    run = f"# {' '.join(variables)} python this.py"
    where = [_AUTHORITY] if url.startswith("tls:") else []
    return [run, *where, _INSTALL, *_PROGRAM.format(url=url).splitlines()]


def _accounts(directory: str) -> str:
    return f"into configmap muster-accounts {_file(directory, 'accounts.conf')}"


def _gate(directory: str) -> str:
    files = f"{_file(directory, 'gate.json')} {_file(directory, 'gate.creds')}"
    return f"into secret generic muster-gate {files}"


def _services(directory: str, names: Collection[str]) -> list[str]:
    return [
        f"into secret generic muster-{one}-creds {_file(directory, f'{one}.creds', 'nats.creds=')}"
        for one in names
    ]


def _file(directory: str, name: str, key: str = "") -> str:
    return shlex.quote(f"--from-file={key}{directory}/{name}")
