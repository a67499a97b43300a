"""Adapter for the network: the steps of `muster demo`, which cause and repair faults.

A step succeeds if its result arrives on the bus, at the Kubernetes API or at the webhook. It
returns a description of the result.
"""

import asyncio
import contextlib
import io
import json
import tempfile
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

from muster import vocabulary
from muster.cli import events, registry
from muster.local import stack
from muster.local.kubernetes import requests
from muster.vocabulary import AlertKind, AlertState, Verdict

_XID: Final = 79
_LABEL: Final = "skypilot.co/accelerator"
POD: Final = "training"
GPUS: Final = sum(node.gpus for node in stack.NODES)
_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05

Play = Callable[[], Awaitable[str]]
"""Plays a step; returns a description of the result."""


class StepFailed(Exception):
    """A step did not have the expected result."""


class Place(Protocol):
    """Where the programs of the scenario run: on this machine, or in containers."""

    def http(self, name: str) -> str:
        """Return the HTTP address of a program."""

    def faults(self, node: str) -> Path:
        """Return the fault script of a node's simulated GPUs."""


class Steps:
    """The steps that can be played in a place; `recorder` records the events published there."""

    def __init__(self, place: Place, recorder: events.Recorder) -> None:
        self._place = place
        self._recorder = recorder

    def healthy(self, fuse: str, a: str) -> list[tuple[str, Play]]:
        """Return the steps before the first fault."""
        return [
            ("advertise", lambda: self._advertised(fuse)),
            ("allocate", lambda: self._allocated(a)),
            ("suggest_labels", self._labels_suggested),
            ("apply_labels", self._labels_applied),
            ("judge_healthy", self._judged_healthy),
        ]

    def on_request(self, a: str, b: str) -> list[tuple[str, Play]]:
        """Return the steps for faults that the stand-ins for kubelets and GPUs cause on request."""
        kubelet_a = self._place.http(f"kubelet-{a}")

        async def refuse_and_drop() -> None:
            await post(f"{kubelet_a}/registration?accept=false")
            await post(f"{kubelet_a}/drop-stream?resource={stack.FUSE}")

        async def accept() -> None:
            await post(f"{kubelet_a}/registration?accept=true")

        async def break_gpu() -> None:
            self._script(b, {"device": 0, "xid": _XID})

        async def repair_gpu() -> None:
            self._script(b, {"device": 0, "clear": _XID})

        return [
            (
                "lose_kubelet_stream",
                lambda: self.detect(a, refuse_and_drop, Verdict.DEREGISTERED),
            ),
            ("register_again", lambda: self.recover(a, accept, AlertKind.DEREGISTERED)),
            ("gpu_xid_79", lambda: self._gpu_lost(b, break_gpu)),
            ("gpu_recovered", lambda: self._gpu_back(b, repair_gpu)),
        ]

    async def detect(self, node: str, harm: Callable[[], Awaitable[None]], verdict: Verdict) -> str:
        """Cause a fault; expect `verdict` and a notification; return a description of both."""
        since = asyncio.get_running_loop().time()
        await harm()
        at, change = await self._recorder.first(
            vocabulary.VerdictChanged,
            lambda event: event.node == node and event.verdict != Verdict.HEALTHY,
            since=since,
        )
        if change.verdict != verdict:
            raise StepFailed(f"the verdict on {node} is {change.verdict}, not {verdict}")
        kind = AlertKind(verdict.lower())
        delivered_s = await self._delivered(kind, node, AlertState.FIRING, since)
        why = change.rule
        if change.evidence:
            why = f"{change.evidence[0].source}: {change.evidence[0].observed}"
        verdict_s = at - since
        return (
            f"{node} {verdict} after {verdict_s:.2f} s ({why}); notified after {delivered_s:.2f} s"
        )

    async def recover(
        self, node: str, repair: Callable[[], Awaitable[None]], kind: AlertKind
    ) -> str:
        """Repair a fault; expect the alert to be resolved and the resolution to be delivered."""
        since = asyncio.get_running_loop().time()
        await repair()
        at, _ = await self._recorder.first(
            vocabulary.VerdictChanged,
            lambda event: event.node == node and event.verdict == Verdict.HEALTHY,
            since=since,
        )
        delivered_s = await self._delivered(kind, node, AlertState.RESOLVED, since)
        return f"{node} HEALTHY after {at - since:.2f} s; resolution after {delivered_s:.2f} s"

    async def _advertised(self, fuse: str) -> str:
        url = f"{self._place.http('kubernetes')}/api/v1/nodes"
        expected = {node.name: node.capacity for node in stack.NODES}
        await poll(url, lambda nodes: _allocatable(nodes) == expected)
        return f"/dev/fuse ({fuse}) and {GPUS} GPUs on {len(expected)} nodes are allocatable"

    async def _allocated(self, node: str) -> str:
        since = asyncio.get_running_loop().time()
        url = f"{self._place.http('kubernetes')}/api/v1/namespaces/default/pods"
        await post(url, _pod(POD, node, {stack.FUSE: 1, stack.GPU: 1}))
        phase = await poll(f"{url}/{POD}", _phase)
        if phase != "Running":
            raise StepFailed(f"the pod is {phase}")
        devices: list[str] = []
        for resource in (stack.FUSE, stack.GPU):
            _, allocation = await self._recorder.first(
                vocabulary.AllocationObserved,
                lambda event, resource=resource: event.resource == resource,  # type: ignore[misc]
                since=since,
            )
            devices.extend(allocation.device_ids)
        return f"pod {POD} runs on {node} with {', '.join(devices)}"

    async def _labels_suggested(self) -> str:
        suggestions = []
        for node in stack.NODES:
            _, event = await self._recorder.first(
                vocabulary.LabelsSuggested,
                lambda event, name=node.name: event.node == name,  # type: ignore[misc]
                since=0.0,
            )
            suggestions.append(", ".join(f"{node.name} {label}" for label in event.labels.values()))
        return f"{'; '.join(suggestions)}; nothing written"

    async def _labels_applied(self) -> str:
        url = self._place.http("kubernetes")
        await poll(f"{url}/api/v1/namespaces/muster/configmaps", _lists_every_node)
        options = ("--apply", "--yes", "--simulated")
        code, _ = await _label_gpus(url, *options, "--node", stack.NODES[0].name)
        if code == 0:
            raise StepFailed("one node was labelled alone, which hides the other nodes")
        code, last_line = await _label_gpus(url, *options)
        if code != 0:
            raise StepFailed(f"muster label-gpus: {last_line}")
        await poll(f"{url}/api/v1/nodes", _all_labelled)
        return f"one node alone is refused, as it would hide the others; together: {last_line}"

    async def _judged_healthy(self) -> str:
        for node in stack.NODES:
            await self._recorder.first(
                vocabulary.VerdictChanged,
                lambda event, name=node.name: (  # type: ignore[misc]
                    (event.node, event.verdict) == (name, Verdict.HEALTHY)
                ),
                since=0.0,
            )
        return f"{len(stack.NODES)} plugins HEALTHY"

    async def _gpu_lost(self, node: str, harm: Callable[[], Awaitable[None]]) -> str:
        since = asyncio.get_running_loop().time()
        await harm()
        await self._gpus_allocatable(node, lost=1)
        kind = AlertKind.DEVICE_UNHEALTHY
        delivered_s = await self._delivered(kind, node, AlertState.FIRING, since)
        return f"{node} offers one GPU fewer; notified after {delivered_s:.2f} s"

    async def _gpu_back(self, node: str, repair: Callable[[], Awaitable[None]]) -> str:
        since = asyncio.get_running_loop().time()
        await repair()
        await self._gpus_allocatable(node, lost=0)
        kind = AlertKind.DEVICE_UNHEALTHY
        delivered_s = await self._delivered(kind, node, AlertState.RESOLVED, since)
        return f"{node} offers all its GPUs; resolution after {delivered_s:.2f} s"

    async def _gpus_allocatable(self, node: str, *, lost: int) -> None:
        count = next(n.gpus for n in stack.NODES if n.name == node) - lost
        url = f"{self._place.http('kubernetes')}/api/v1/nodes"
        await poll(url, lambda nodes: _allocatable(nodes)[node].get(stack.GPU) == count)

    async def _delivered(
        self, kind: AlertKind, node: str, state: AlertState, since: float
    ) -> float:
        """Return the seconds from `since` until the notifier reported delivery to the webhook."""
        _, alert = await self._recorder.first(
            vocabulary.AlertChanged,
            lambda event: (event.kind, event.node, event.state) == (kind, node, state),
            since=since,
        )
        is_firing = state == AlertState.FIRING
        at, _ = await self._recorder.first(
            vocabulary.NotificationDelivered,
            lambda event: (
                event.receiver == "webhook"
                and alert.fingerprint in (event.firing if is_firing else event.resolved)
            ),
            since=since,
        )
        received = json.dumps(await _get(f"{self._place.http('webhook')}/received"))
        if alert.fingerprint not in received:
            raise StepFailed(f"the webhook did not receive alert {alert.fingerprint}")
        return at - since

    def _script(self, node: str, fault: dict[str, int]) -> None:
        with self._place.faults(node).open("a") as script:
            script.write(json.dumps(fault) + "\n")


async def post(url: str, body: object = None) -> Any:
    """Send a POST request with a JSON body; return the decoded JSON answer."""
    return await asyncio.to_thread(_call, "POST", url, body)


async def delete(url: str) -> Any:
    """Delete the object at an address; return the decoded JSON answer."""
    return await asyncio.to_thread(_call, "DELETE", url, None)


async def _get(url: str) -> Any:
    return await asyncio.to_thread(_call, "GET", url, None)


async def poll(url: str, check: Callable[[Any], Any]) -> Any:
    """Read a URL until `check` returns a true value for its content; return that value."""
    while True:
        result = check(await _get(url))
        if result:
            return result
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


async def _label_gpus(url: str, *options: str) -> tuple[int, str]:
    """Run `muster label-gpus` as an administrator would; return its exit code and last line."""
    with tempfile.NamedTemporaryFile("w", prefix="muster-", suffix=".json") as file:
        json.dump(requests.kubeconfig(url), file)
        file.flush()
        return await asyncio.to_thread(_captured, "label-gpus", *options, "--kubeconfig", file.name)


def _captured(command: str, *arguments: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = registry.call(command, *arguments)
    return code, printed.getvalue().rstrip().rpartition("\n")[2]


def _pod(name: str, node: str, resources: dict[str, int]) -> dict[str, object]:
    """Return the manifest of a pod on a node that requests devices."""
    limits = {resource: str(count) for resource, count in resources.items()}
    container = {"name": "main", "image": "demo", "resources": {"limits": limits}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": node, "containers": [container]},
    }


def _allocatable(nodes: Any) -> dict[str, dict[str, int]]:
    """Return each node's allocatable device resources that are not 0."""
    return {
        node["metadata"]["name"]: {
            resource: int(count)
            for resource, count in node.get("status", {}).get("allocatable", {}).items()
            if "/" in resource and str(count) != "0"
        }
        for node in nodes["items"]
    }


def _lists_every_node(configmaps: Any) -> bool:
    """Return whether the labeler has stored a report from the plugin of every node."""
    texts = [text for item in configmaps["items"] for text in item.get("data", {}).values()]
    return any(all(f'"{node.name}"' in text for node in stack.NODES) for text in texts)


def _all_labelled(nodes: Any) -> bool:
    return all(_LABEL in node["metadata"].get("labels", {}) for node in nodes["items"])


def _phase(pod: Any) -> str | None:
    phase: str = pod.get("status", {}).get("phase", "Pending")
    return None if phase == "Pending" else phase
