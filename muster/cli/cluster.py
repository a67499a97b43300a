"""Adapter: the stand-ins over HTTP: what the demo asks of API server, kubelets and webhook."""

import asyncio
import contextlib
import io
import json
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Final

from muster.cli import services

_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05


async def get(url: str) -> Any:
    """Return the JSON at an address."""
    return await asyncio.to_thread(_call, "GET", url, None)


async def post(url: str, body: object = None) -> Any:
    """Post JSON; return the answer."""
    return await asyncio.to_thread(_call, "POST", url, body)


async def delete(url: str) -> Any:
    """Delete what is at an address; return the answer."""
    return await asyncio.to_thread(_call, "DELETE", url, None)


async def until(url: str, found: Any) -> Any:
    """Read an address until `found` says something about what is there; return what it said."""
    while True:
        answer = found(await get(url))
        if answer:
            return answer
        await asyncio.sleep(_POLL_S)


def _call(method: str, url: str, body: object) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)  # noqa: S310  # our own stand-ins
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # the same
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{method} {url}: {error.code} {error.read(500).decode()}") from None


def pod(name: str, node: str, resources: dict[str, int]) -> dict[str, object]:
    """Return a pod that asks for devices on a node."""
    limits = {resource: str(count) for resource, count in resources.items()}
    container = {"name": "main", "image": "demo", "resources": {"limits": limits}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": node, "containers": [container]},
    }


async def label_gpus(url: str, *words: str) -> tuple[int, str]:
    """Run `muster label-gpus` as an administrator would; return its exit code and last words."""
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "demo",
        "clusters": [{"name": "demo", "cluster": {"server": url}}],
        "users": [{"name": "demo", "user": {}}],
        "contexts": [{"name": "demo", "context": {"cluster": "demo", "user": "demo"}}],
    }
    with tempfile.NamedTemporaryFile("w", prefix="muster-", suffix=".json") as file:
        json.dump(kubeconfig, file)
        file.flush()
        return await asyncio.to_thread(_captured, "label-gpus", *words, "--kubeconfig", file.name)


def _captured(command: str, *arguments: str) -> tuple[int, str]:
    """Run a service's command; return its exit code and the last line that it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = services.call(command, *arguments)
    return code, printed.getvalue().rstrip().rpartition("\n")[2]
