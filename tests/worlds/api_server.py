"""A real Kubernetes API server: the one that KUBECONFIG names, or one started from envtest's files.

KUBEBUILDER_ASSETS is a folder with `etcd` and `kube-apiserver`, as `setup-envtest` fetches them.
"""

import contextlib
import json
import os
import pathlib
import secrets
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Final

import pytest

from muster.local import nats

NONE: Final = (
    "no real API server: set KUBECONFIG to a throwaway cluster's, or KUBEBUILDER_ASSETS to a "
    "folder with etcd and kube-apiserver (setup-envtest use -p path)"
)
_UP_S: Final = 60.0


@contextlib.contextmanager
def asked_for(request: pytest.FixtureRequest) -> Iterator[tuple[str, pathlib.Path]]:
    """Give the kubeconfig of an administrator and a directory; skip where there is no server."""
    if "cluster" not in str(request.config.getoption("-m")):
        pytest.skip("only with -m cluster")
    with tempfile.TemporaryDirectory(prefix="mu-") as name:
        directory = pathlib.Path(name)
        with kubeconfig(directory) as config:
            if config is None:
                pytest.skip(NONE)
            yield config, directory


@contextlib.contextmanager
def kubeconfig(directory: pathlib.Path) -> Iterator[str | None]:
    """Give the kubeconfig of an administrator of the server; None if none is named."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        with _started(pathlib.Path(assets), directory) as file:
            yield str(file)
    else:
        yield os.environ.get("KUBECONFIG")


@contextlib.contextmanager
def _started(assets: pathlib.Path, directory: pathlib.Path) -> Iterator[pathlib.Path]:
    client, peer, port = nats.free_port(), nats.free_port(), nats.free_port()
    key, tokens = directory / "sa.key", directory / "tokens.csv"
    make = ["openssl", "genrsa", "-out", str(key), "2048"]
    subprocess.run(make, check=True, capture_output=True)
    token = secrets.token_hex(16)
    tokens.write_text(f"{token},admin,admin,system:masters\n")
    etcd = [
        *(str(assets / "etcd"), "--data-dir", str(directory / "etcd")),
        *("--listen-client-urls", f"http://127.0.0.1:{client}"),
        *("--advertise-client-urls", f"http://127.0.0.1:{client}"),
        *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
        *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
        *("--initial-cluster", f"default=http://127.0.0.1:{peer}", "--unsafe-no-fsync"),
    ]
    api = [
        *(str(assets / "kube-apiserver"), "--etcd-servers", f"http://127.0.0.1:{client}"),
        *("--bind-address", "127.0.0.1", "--secure-port", str(port)),
        *("--cert-dir", str(directory / "certificates"), "--token-auth-file", str(tokens)),
        *("--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.0.0.0/24"),
        *("--service-account-issuer", "https://kubernetes.default.svc"),
        *("--service-account-key-file", str(key)),
        *("--service-account-signing-key-file", str(key)),
        *("--disable-admission-plugins", "ServiceAccount"),
    ]
    file = directory / "kubeconfig"
    file.write_text(json.dumps(config(f"https://127.0.0.1:{port}", token)))
    with _running(etcd, directory / "etcd.log"), _running(api, directory / "api.log"):
        _until_ready(f"http://127.0.0.1:{client}/health")
        _until_ready(f"https://127.0.0.1:{port}/readyz", token)
        yield file


def config(url: str, token: str) -> dict[str, object]:
    """Return a kubeconfig of a server whose certificate is of its own making."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }


@contextlib.contextmanager
def _running(command: Sequence[str], log: pathlib.Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


def _until_ready(url: str, token: str = "") -> None:
    context = ssl._create_unverified_context() if url.startswith("https") else None  # noqa: S323  # our own server
    until = time.monotonic() + _UP_S
    while True:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})  # noqa: S310  # our own server
        try:
            with urllib.request.urlopen(request, timeout=30, context=context):  # noqa: S310  # the same
                return
        except OSError as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            assert time.monotonic() < until, f"{url}: not ready within {_UP_S:g} s"
            time.sleep(0.2)
