"""Adapter for files: `muster auth` creates and changes the keys and credentials for the bus.

It prints the commands that copy them to a cluster.
"""

import shlex
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

import cyclopts
from cyclopts import Parameter

from muster import commands, vocabulary
from muster.cli import keyfiles, output, texts
from muster.nats.auth import accounts as bus_accounts
from muster.nats.auth import permissions

app = cyclopts.App(name="auth", help="Create and change the keys and credentials for the bus.")

_VALID_MAX: Final = timedelta(days=3650)
_KEYS: Final = Path("muster-keys")
_HOSTS: Final = ("localhost", "127.0.0.1", "::1", "muster-nats", "*.muster-nats")
_HOSTS_IN_CLUSTER: Final = ("muster-nats.muster", "*.muster-nats.muster.svc.cluster.local")
_BY_HAND: Final = {
    "node": "give new credentials to the nodes that use credentials: muster auth node",
    "reader": "give new credentials to readers: muster auth reader",
}
"""The manual steps for credentials that no command can deliver."""

_Keys = Annotated[
    Path,
    Parameter(
        name=["--keys", "-k"],
        env_var="MUSTER_AUTH_KEYS",
        help="The directory that `muster auth init` created.",
    ),
]
_Out = Annotated[
    Path | None,
    Parameter(
        name=["--out", "-o"],
        help="Write the credentials to this file, readable only by you; do not print them.",
    ),
]
_Valid = Annotated[
    str | None,
    Parameter(help="How long the credentials last: `30d`, `1y`; by default until the key changes."),
]

_SERVICES: Final = ("health", "labeler", "notifier", "console")
"""The services whose credentials are in Secrets named `muster-SERVICE-creds`."""

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


@app.command
def init(directory: Path) -> int:
    """Create an installation's keys, accounts.conf for NATS, and each service's credentials.

    Parameters
    ----------
    directory
        The directory to write them to; it must not contain keys yet.

    """

    def make() -> list[str]:
        if directory == Path():
            raise ValueError("choose a separate directory for the keys")
        files = keyfiles.make(directory, at=time.time())
        return [
            _written(directory, files),
            f"Keep {directory} readable only by you. To copy the files to the cluster:\n",
            *_first(str(directory)),
        ]

    return _run("init", make)


@app.command
def accounts(*, keys: _Keys = _KEYS) -> int:
    """Create accounts.conf and the services' credentials again, for example after an upgrade."""

    def make() -> list[str]:
        files = keyfiles.derive(keys, at=time.time())
        return [f"{_written(keys, files)}\n", *_again(str(keys))]

    return _run("accounts", make)


@app.command
def node(
    node: str,
    *,
    plugin: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    valid: _Valid = None,
    out: _Out = None,
    keys: _Keys = _KEYS,
) -> int:
    """Print credentials for the plugins on one node, for clusters without node tokens.

    Parameters
    ----------
    node
        The node's name.
    plugin
        Another plugin name besides `device-plugin`; at most 8 names in all.

    """

    def make() -> list[str]:
        names = {permissions.PLUGIN, *plugin}
        name = permissions.plugin(vocabulary.node_token(node), names).user
        text = _credentials(keys, bus_accounts.Role.NODE, name, valid, plugin)
        return _kept_secret(text, out)

    return _run("node", make)


@app.command
def reader(
    *,
    name: str,
    valid: _Valid = None,
    out: _Out = None,
    url: str = "tls://muster-nats.muster:4222",
    keys: _Keys = _KEYS,
) -> int:
    """Print credentials for an outside tool that subscribes, and an example program.

    Parameters
    ----------
    name
        The name of the tool: letters, digits, `-` and `_`.
    url
        The address of NATS in the example program.

    """

    def make() -> list[str]:
        if not name:
            raise ValueError("--name: must not be empty")
        user = permissions.reader(name).user
        text = _credentials(keys, bus_accounts.Role.READER, user, valid)
        file = out or Path(f"{name}.creds")
        return [*_kept_secret(text, out), *_subscriber(str(file), url)]

    return _run("reader", make)


@app.command
def rotate(key: str, *, drop: output.Flag = False, keys: _Keys = _KEYS) -> int:
    """Rotate a signing key: both keys are valid until `--drop` removes the old one.

    Parameters
    ----------
    key
        `answer`, `node`, `reader`, `health`, `labeler`, `notifier`, `console` or `admin`.
    drop
        Invalidate the old key. Use this after everything has been signed with the new key.

    """

    def make() -> list[str]:
        if key not in bus_accounts.CHANGEABLE:
            raise ValueError(f"{key!r}: must be one of {', '.join(bus_accounts.CHANGEABLE)}")
        if drop:
            files = keyfiles.drop(keys, key, at=time.time())
            then = f"The old {key} key is invalid as soon as NATS has loaded these files:\n"
            return [_written(keys, files), then, *_dropped(str(keys))]
        files = keyfiles.rotate(keys, key, at=time.time())
        option = "" if keys == _KEYS else f" --keys {shlex.quote(str(keys))}"
        by_hand = [f"\nThen {_BY_HAND[key]}."] if key in _BY_HAND else []
        return [
            _written(keys, files),
            f"Both {key} keys are valid once NATS has loaded the new accounts.conf:\n",
            *_again(str(keys), key=key),
            *by_hand,
            f"\nFinally: muster auth rotate {key} --drop{option}",
        ]

    return _run("rotate", make)


@app.command
def local_ca(
    directory: Path,
    *,
    host: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    valid: str = "10y",
    renew: output.Flag = False,
) -> int:
    """Create a certificate authority, and a certificate for NATS: ca.crt, tls.crt, tls.key.

    Parameters
    ----------
    directory
        The directory to write them to.
    host
        Another name or address of NATS. localhost and the short names of the Service `muster-nats`
        in the namespace `muster` are always included.
    valid
        How long the certificate is valid; the authority is valid for 20 years.
    renew
        Create a new certificate from the existing authority; clients need no change.

    """

    def make() -> list[str]:
        if directory == Path():
            raise ValueError("choose a separate directory for the certificates")
        at, lasts = datetime.now(UTC), _lasts(valid)
        hosts = list(dict.fromkeys((*_HOSTS, *_HOSTS_IN_CLUSTER, *host)))
        change = keyfiles.renew_certificate if renew else keyfiles.make_certificates
        files = change(directory, hosts, at=at, lasts=lasts)
        return [
            f"{_written(directory, files)}; the certificate is valid until {at + lasts:%Y-%m-%d}",
            f"Keep ca.key private. Clients: NATS_CA={directory / 'ca.crt'}. In a cluster:\n",
            *_tls(str(directory)),
            *(_RESTART if renew else ()),
        ]

    return _run("local-ca", make)


@app.command
def cluster(
    *,
    production: output.Flag = False,
    context: str | None = None,
    namespace: str = "muster",
    name: Annotated[str, Parameter(env_var="MUSTER_AUTH_NAME")] = "muster",
) -> int:
    """Create the missing Secrets of an installation in a cluster; existing ones are not replaced.

    Parameters
    ----------
    production
        Create keys and a certificate, as `production` requires, instead of passwords.
    context
        The kubeconfig context; by default the current context, or the cluster that this command
        runs in.
    namespace
        The namespace of muster.
    name
        The prefix of all names: the chart's `fullnameOverride`.

    """
    if problem := commands.missing("labeler"):
        return output.fail("auth cluster", problem, code=1)
    from muster.cli import cluster_keys  # noqa: PLC0415  # the Kubernetes client, only where it is used

    installation = cluster_keys.Installation(name=name, namespace=namespace, production=production)
    return cluster_keys.run("muster auth cluster", installation, context=context)


def _run(command: str, make: Callable[[], Sequence[str]]) -> int:
    name = f"auth {command}"
    try:
        lines = make()
    except (ValueError, keyfiles.BadDirectory) as error:
        return output.fail(name, str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return output.fail(name, f"{where}{error.strerror or error}")
    output.show(*"\n".join(lines).split("\n"))
    return 0


def _credentials(
    keys: Path,
    role: bus_accounts.Role,
    name: str,
    valid: str | None,
    plugins: Collection[str] = (),
) -> str:
    at = time.time()
    until = None if valid is None else at + _lasts(valid).total_seconds()
    return keyfiles.user(keys, role, name=name, at=at, until=until, plugins=plugins)


def _kept_secret(text: str, out: Path | None) -> list[str]:
    """Return the lines to print for a secret; with `out`, write it there and return no line."""
    if out is None:
        return [text]
    if out.exists() and not out.is_file():
        raise ValueError(f"--out: {out} is not a file")
    keyfiles.write(out, text)
    return []


def _written(directory: Path, names: Sequence[str]) -> str:
    return f"wrote {', '.join(names)} in {directory}"


def _lasts(text: str) -> timedelta:
    try:
        return texts.duration(text, longest=_VALID_MAX)
    except ValueError:
        raise ValueError(
            f"--valid: {text!r} is not a duration such as 12h, 30d or 1y, at most 10y"
        ) from None


def _first(directory: str) -> list[str]:
    """Return the commands to run before NATS starts in the cluster."""
    return [_INTO, _accounts(directory), _gate(directory), *_services(directory, _SERVICES)]


def _again(directory: str, *, key: str | None = None) -> list[str]:
    """Return the commands to run after permissions or keys have changed.

    With `key`, only the commands for that key. NATS comes first, because it refuses credentials of
    keys that it has not loaded.
    """
    changed = _SERVICES if key is None else tuple({key}.intersection(_SERVICES))
    gate = [_gate(directory)] if key in {None, "answer", "node"} else []
    return [_INTO, _accounts(directory), *_RESTART, *gate, *_services(directory, changed)]


def _dropped(directory: str) -> list[str]:
    """Return the commands that make an old key invalid."""
    return [_INTO, _accounts(directory), *_RESTART]


def _tls(directory: str) -> list[str]:
    """Return the commands that copy an authority, a certificate and its key to the cluster.

    The key is in a Secret that only NATS refers to, because a node may read every Secret that its
    pods refer to.
    """
    files = " ".join(_file(directory, name) for name in ("tls.crt", "tls.key", "ca.crt"))
    return [
        _INTO,
        f"into secret generic muster-nats-tls {files}",
        f"into configmap muster-nats-ca {_file(directory, 'ca.crt')}",
    ]


def _subscriber(creds: str, url: str) -> list[str]:
    """Return a program that subscribes with these credentials, and how to run it."""
    variables = [f"NATS_CREDS={shlex.quote(creds)}"]
    if url.startswith("tls:"):
        variables.append("NATS_CA=ca.crt")
    run = f"# {' '.join(variables)} python this.py"
    authority = [_AUTHORITY] if url.startswith("tls:") else []
    return [run, *authority, _INSTALL, *_PROGRAM.format(url=url).splitlines()]


def _accounts(directory: str) -> str:
    return f"into configmap muster-accounts {_file(directory, 'accounts.conf')}"


def _gate(directory: str) -> str:
    files = f"{_file(directory, 'gate.json')} {_file(directory, 'gate.creds')}"
    return f"into secret generic muster-gate {files}"


def _services(directory: str, names: Collection[str]) -> list[str]:
    return [
        f"into secret generic muster-{name}-creds "
        + _file(directory, f"{name}.creds", "nats.creds=")
        for name in names
    ]


def _file(directory: str, name: str, key: str = "") -> str:
    return shlex.quote(f"--from-file={key}{directory}/{name}")
