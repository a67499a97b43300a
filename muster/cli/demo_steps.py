"""Adapter: people: what happens in the story of `muster demo`, and what must come of it.

Every act is judged by what came out at the far end: on the bus, at the Kubernetes API, at the
webhook. It returns what was seen, in words.
"""

import asyncio
import contextlib
import io
import json
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

from muster import vocabulary
from muster.cli import bus_client, services
from muster.local import layout
from muster.vocabulary import AlertKind, AlertState, Verdict

_XID: Final = 79
_LABEL: Final = "skypilot.co/accelerator"
POD: Final = "training"
GPUS: Final = sum(node.gpus for node in layout.NODES)

Act = Callable[[], Awaitable[str]]
_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05


class StepFailed(Exception):
    """A step did not come out as it must."""


class Place(Protocol):
    """Where what the story asks is: on this machine, or elsewhere."""

    def http(self, name: str) -> str:
        """Return where a program serves HTTP."""

    def faults(self, node: str) -> Path:
        """Return the fault script of a node's simulated GPUs."""


class Acts:
    """What can be played at a place, as it is heard there."""

    def __init__(self, place: Place, heard: bus_client.Watch) -> None:
        self._place = place
        self._watch = heard

    def at_first(self, fuse: str, a: str) -> list[tuple[str, Act]]:
        """Return what is to be seen before anything breaks."""
        return [
            ("advertise", lambda: self._advertised(fuse)),
            ("allocate", lambda: self._allocated(a)),
            ("suggest_labels", self._labels_suggested),
            ("apply_labels", self._labels_applied),
            ("judge_healthy", self._judged_healthy),
        ]

    def asked_for(self, a: str, b: str) -> list[tuple[str, Act]]:
        """Return what the stand-ins do when they are asked: a kubelet, a fault script."""
        kubelet_a = self._place.http(f"kubelet-{a}")

        async def refuse_and_drop() -> None:
            await post(f"{kubelet_a}/registration?accept=false")
            await post(f"{kubelet_a}/drop-stream?resource={layout.FUSE}")

        async def accept() -> None:
            await post(f"{kubelet_a}/registration?accept=true")

        async def break_gpu() -> None:
            self._script(b, {"device": 0, "xid": _XID})

        async def mend_gpu() -> None:
            self._script(b, {"device": 0, "clear": _XID})

        lost = self.noticed
        return [
            ("lose_kubelet_stream", lambda: lost(a, refuse_and_drop, Verdict.DEREGISTERED)),
            ("register_again", lambda: self.mended(a, accept, AlertKind.DEREGISTERED)),
            ("gpu_xid_79", lambda: self._gpu_lost(b, break_gpu)),
            ("gpu_recovered", lambda: self._gpu_back(b, mend_gpu)),
        ]

    async def noticed(
        self, node: str, harm: Callable[[], Awaitable[None]], verdict: Verdict
    ) -> str:
        """Do harm; people must be told by its verdict."""
        since = asyncio.get_running_loop().time()
        await harm()
        at, seen = await self._watch.first(
            vocabulary.VerdictChanged,
            lambda e: e.node == node and e.verdict != Verdict.HEALTHY,
            since=since,
        )
        if seen.verdict != verdict:
            raise StepFailed(f"{node} judged {seen.verdict}, not {verdict}")
        told_s = await self._delivered(AlertKind(verdict.lower()), node, AlertState.FIRING, since)
        why = seen.evidence[0].observed if seen.evidence else seen.rule
        return f"{node} {verdict} after {at - since:.2f} s ({why}); told after {told_s:.2f} s"

    async def mended(self, node: str, mend: Callable[[], Awaitable[None]], kind: AlertKind) -> str:
        """Mend it; people must be told that its alert is over."""
        since = asyncio.get_running_loop().time()
        await mend()
        at, _ = await self._watch.first(
            vocabulary.VerdictChanged,
            lambda e: e.node == node and e.verdict == Verdict.HEALTHY,
            since=since,
        )
        told_s = await self._delivered(kind, node, AlertState.RESOLVED, since)
        return f"{node} HEALTHY after {at - since:.2f} s; resolution told after {told_s:.2f} s"

    async def _advertised(self, fuse: str) -> str:
        url = f"{self._place.http('kubernetes')}/api/v1/nodes"
        wanted = {node.name: node.capacity for node in layout.NODES}
        await until(url, lambda nodes: _offers(nodes) == wanted)
        return f"/dev/fuse ({fuse}) and {GPUS} GPUs on {len(wanted)} nodes are allocatable"

    async def _allocated(self, node: str) -> str:
        since = asyncio.get_running_loop().time()
        url = f"{self._place.http('kubernetes')}/api/v1/namespaces/default/pods"
        await post(url, pod(POD, node, {layout.FUSE: 1, layout.GPU: 1}))
        phase = await until(f"{url}/{POD}", _phase)
        if phase != "Running":
            raise StepFailed(f"the pod is {phase}")
        devices: list[str] = []
        for resource in (layout.FUSE, layout.GPU):
            _, seen = await self._watch.first(
                vocabulary.AllocationObserved,
                lambda e, resource=resource: e.resource == resource,  # type: ignore[misc]
                since=since,
            )
            devices.extend(seen.device_ids)
        return f"pod {POD} runs on {node} with {', '.join(devices)}"

    async def _labels_suggested(self) -> str:
        found = []
        for node in layout.NODES:
            _, event = await self._watch.first(
                vocabulary.LabelsSuggested,
                lambda e, name=node.name: e.node == name,  # type: ignore[misc]
                since=0.0,
            )
            found.append(", ".join(f"{node.name} {value}" for value in event.labels.values()))
        return f"{'; '.join(found)}; nothing written"

    async def _labels_applied(self) -> str:
        url = self._place.http("kubernetes")
        listed = f"{url}/api/v1/namespaces/muster/configmaps"
        await until(listed, _lists_every_node)
        options = ("--apply", "--yes", "--simulated")
        alone, said = await label_gpus(url, *options, "--node", layout.NODES[0].name)
        if alone == 0:
            raise StepFailed("one node alone was labelled, which hides the others")
        code, said = await label_gpus(url, *options)
        if code != 0:
            raise StepFailed(f"muster label-gpus: {said}")
        await until(f"{url}/api/v1/nodes", _all_labelled)
        return f"one node alone is refused, as it would hide the others; all at once: {said}"

    async def _judged_healthy(self) -> str:
        for node in layout.NODES:
            await self._watch.first(
                vocabulary.VerdictChanged,
                lambda e, name=node.name: (e.node, e.verdict) == (name, Verdict.HEALTHY),  # type: ignore[misc]
                since=0.0,
            )
        return f"{len(layout.NODES)} plugins HEALTHY"

    async def _gpu_lost(self, node: str, harm: Callable[[], Awaitable[None]]) -> str:
        since = asyncio.get_running_loop().time()
        await harm()
        await self._gpus_allocatable(node, lost=1)
        told_s = await self._delivered(AlertKind.DEVICE_UNHEALTHY, node, AlertState.FIRING, since)
        return f"{node} offers one GPU less; told after {told_s:.2f} s"

    async def _gpu_back(self, node: str, mend: Callable[[], Awaitable[None]]) -> str:
        since = asyncio.get_running_loop().time()
        await mend()
        await self._gpus_allocatable(node, lost=0)
        told_s = await self._delivered(AlertKind.DEVICE_UNHEALTHY, node, AlertState.RESOLVED, since)
        return f"{node} offers all its GPUs; resolution told after {told_s:.2f} s"

    async def _gpus_allocatable(self, node: str, *, lost: int) -> None:
        wanted = next(n.gpus for n in layout.NODES if n.name == node) - lost
        url = f"{self._place.http('kubernetes')}/api/v1/nodes"
        await until(url, lambda nodes: _offers(nodes)[node].get(layout.GPU) == wanted)

    async def _delivered(
        self, kind: AlertKind, node: str, state: AlertState, since: float
    ) -> float:
        """Return after how many seconds the webhook had the alert, proven by the receiver."""
        _, alert = await self._watch.first(
            vocabulary.AlertChanged,
            lambda e: (e.kind, e.node, e.state) == (kind, node, state),
            since=since,
        )
        at, _ = await self._watch.first(
            vocabulary.NotificationDelivered,
            lambda e: (
                e.receiver == "webhook"
                and alert.fingerprint in (e.firing if state == AlertState.FIRING else e.resolved)
            ),
            since=since,
        )
        received = json.dumps(await get(f"{self._place.http('webhook')}/received"))
        if alert.fingerprint not in received:
            raise StepFailed(f"the webhook never got alert {alert.fingerprint}")
        return at - since

    def _script(self, node: str, fault: dict[str, int]) -> None:
        with self._place.faults(node).open("a") as script:
            script.write(json.dumps(fault) + "\n")


def _offers(nodes: Any) -> dict[str, dict[str, int]]:
    """Return what each node offers: the allocatable device resources that are not 0."""
    return {
        node["metadata"]["name"]: {
            resource: int(count)
            for resource, count in node.get("status", {}).get("allocatable", {}).items()
            if "/" in resource and str(count) != "0"
        }
        for node in nodes["items"]
    }


def _lists_every_node(found: Any) -> bool:
    """Tell whether the labeler wrote down, for the commands, what every node's plugin reported."""
    texts = [text for item in found["items"] for text in item.get("data", {}).values()]
    return any(all(f'"{node.name}"' in text for node in layout.NODES) for text in texts)


def _all_labelled(nodes: Any) -> bool:
    return all(_LABEL in node["metadata"].get("labels", {}) for node in nodes["items"])


def _phase(pod: Any) -> str | None:
    phase: str = pod.get("status", {}).get("phase", "Pending")
    return None if phase == "Pending" else phase


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
