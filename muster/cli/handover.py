"""Pure: The commands by which keys and certificates come to those who need them, to be printed."""

import shlex
from collections.abc import Collection
from typing import Final

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
