"""Door to people: `muster demo` plays one story on the local stack and reports what was seen.

Every step has a deadline and is judged by what came out at the far end: on the bus, at the
Kubernetes API, at the webhook. The nodes, kubelets and GPUs are simulated, and the story says so.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from muster import runtime, vocabulary
from muster.cli import cluster, story, watch
from muster.local import layout, nats, processes, stack
from muster.vocabulary import AlertKind, AlertState, Verdict

_STEP_TIMEOUT_S: Final = 20.0
_XID: Final = 79
_LABEL: Final = "skypilot.co/accelerator"
POD: Final = "training"
GPUS: Final = sum(node.gpus for node in layout.NODES)

Play = Callable[[], Awaitable[str]]


class StepFailed(Exception):
    """A step did not come out as it must."""


def run(*, as_json: bool) -> int:
    """Play the story; return 0 if every step came out, 1 if one did not, 130 after Ctrl-C."""
    return tell(Demo(quiet=as_json), as_json=as_json)


def tell(demo: "Demo", *, as_json: bool) -> int:
    """Play a story and say what came of it; return the exit code."""
    try:
        asyncio.run(runtime.run(demo.play()))
    except (nats.NatsUnavailable, processes.ProgramFailed) as error:
        demo.note(story.Step(name="start", ok=False, seconds=0.0, detail=str(error)))
    if not demo.complete and all(step.ok for step in demo.steps):
        print("muster demo: interrupted", file=sys.stderr)
        return 130
    report = story.report(demo.steps, complete=demo.complete)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        failed = [step.name for step in demo.steps if not step.ok]
        outcome = f"failed at: {', '.join(failed)}" if failed else "every step came out"
        print(f"\n{outcome}; {report.seconds} s")
    return 0 if report.ok else 1


class Place(Protocol):
    """Where what the story asks is: on this machine, or elsewhere."""

    def http(self, name: str) -> str:
        """Return where a program serves HTTP."""

    def faults(self, node: str) -> Path:
        """Return the fault script of a node's simulated GPUs."""


class Demo:
    """One playing of the story."""

    def __init__(self, *, quiet: bool) -> None:
        self.steps: list[story.Step] = []
        self.complete = False
        self._quiet = quiet
        self._watch = watch.Watch()
        self._place: Place

    def note(self, step: story.Step) -> None:
        """Keep a step and print it."""
        self.steps.append(step)
        if not self._quiet:
            at_s = sum(s.seconds for s in self.steps)
            print(story.line(step, at_s=at_s), flush=True)

    async def play(self) -> None:
        """Start the stack, play, end it; stop at the first step that fails."""
        self._print(f"simulated: 3 nodes, their kubelets and {GPUS} GPUs; the rest is real\n")
        running = stack.Stack(
            say=lambda _: None, restart=False, nats_url=os.environ.get("NATS_URL")
        )
        clock = asyncio.get_running_loop().time
        began = clock()
        started = datetime.now(UTC)
        pids: set[int] = set()
        async with running:
            self._place = self._stack = running
            fuse = "a simulated one" if running.fuse_simulated else "this machine's own"
            pids = running.pids()
            async with watch.everything(running.nats_url, self._watch.hear, since=started):
                self._note("start", began, f"{len(pids)} processes")
                await self._play(self._chapters(fuse))
            pids |= running.pids()
            began = clock()
        left = [f"process {pid}" for pid in sorted(pids) if _is_there(pid)]
        left += [str(running.directory)] if running.directory.exists() else []
        detail = f"left: {', '.join(left)}" if left else "no process, no socket, no file left"
        self._note("stop", began, detail, ok=not left)
        self.complete = True

    async def _play(self, chapters: list[tuple[str, Play]]) -> None:
        for name, act in chapters:
            began = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(_STEP_TIMEOUT_S):
                    self._note(name, began, await act())
            except TimeoutError:
                self._note(name, began, f"not seen within {_STEP_TIMEOUT_S:g} s", ok=False)
                return
            except (StepFailed, processes.ProgramFailed, OSError) as error:
                self._note(name, began, str(error), ok=False)
                return

    def _note(self, name: str, began: float, detail: str, *, ok: bool = True) -> None:
        seconds = asyncio.get_running_loop().time() - began
        self.note(story.Step(name=name, ok=ok, seconds=seconds, detail=detail))

    def _chapters(self, fuse: str) -> list[tuple[str, Play]]:
        """Return the story: each fault on another node, noticed, delivered, mended, resolved."""
        a, b, c = (node.name for node in layout.NODES)
        plugin = {node.name: self._stack.processes[f"plugin-{node.name}"] for node in layout.NODES}

        async def freeze() -> None:
            plugin[b].signal(signal.SIGSTOP)

        async def thaw() -> None:
            plugin[b].signal(signal.SIGCONT)

        noticed, mended = self._noticed, self._mended
        return [
            *self._at_first(fuse, a),
            ("freeze_plugin", lambda: noticed(b, freeze, Verdict.STUCK)),
            ("thaw_plugin", lambda: mended(b, thaw, AlertKind.STUCK)),
            ("kill_plugin", lambda: noticed(c, plugin[c].kill, Verdict.PLUGIN_DOWN)),
            ("restart_plugin", lambda: mended(c, plugin[c].start, AlertKind.PLUGIN_DOWN)),
            *self._asked_for(a, b),
        ]

    def _at_first(self, fuse: str, a: str) -> list[tuple[str, Play]]:
        """Return what is to be seen before anything breaks."""
        return [
            ("advertise", lambda: self._advertised(fuse)),
            ("allocate", lambda: self._allocated(a)),
            ("suggest_labels", self._labels_suggested),
            ("apply_labels", self._labels_applied),
            ("judge_healthy", self._judged_healthy),
        ]

    def _asked_for(self, a: str, b: str) -> list[tuple[str, Play]]:
        """Return what the stand-ins do when they are asked: a kubelet, a fault script."""
        kubelet_a = self._place.http(f"kubelet-{a}")

        async def refuse_and_drop() -> None:
            await cluster.post(f"{kubelet_a}/registration?accept=false")
            await cluster.post(f"{kubelet_a}/drop-stream?resource={layout.FUSE}")

        async def accept() -> None:
            await cluster.post(f"{kubelet_a}/registration?accept=true")

        async def break_gpu() -> None:
            self._script(b, {"device": 0, "xid": _XID})

        async def mend_gpu() -> None:
            self._script(b, {"device": 0, "clear": _XID})

        lost = self._noticed
        return [
            ("lose_kubelet_stream", lambda: lost(a, refuse_and_drop, Verdict.DEREGISTERED)),
            ("register_again", lambda: self._mended(a, accept, AlertKind.DEREGISTERED)),
            ("gpu_xid_79", lambda: self._gpu_lost(b, break_gpu)),
            ("gpu_recovered", lambda: self._gpu_back(b, mend_gpu)),
        ]

    async def _advertised(self, fuse: str) -> str:
        url = f"{self._place.http('kubernetes')}/api/v1/nodes"
        wanted = {node.name: node.capacity for node in layout.NODES}
        await cluster.until(url, lambda nodes: _offers(nodes) == wanted)
        return f"/dev/fuse ({fuse}) and {GPUS} GPUs on {len(wanted)} nodes are allocatable"

    async def _allocated(self, node: str) -> str:
        since = asyncio.get_running_loop().time()
        url = f"{self._place.http('kubernetes')}/api/v1/namespaces/default/pods"
        await cluster.post(url, cluster.pod(POD, node, {layout.FUSE: 1, layout.GPU: 1}))
        phase = await cluster.until(f"{url}/{POD}", _phase)
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
        await cluster.until(listed, _lists_every_node)
        options = ("--apply", "--yes", "--simulated")
        alone, said = await cluster.label_gpus(url, *options, "--node", layout.NODES[0].name)
        if alone == 0:
            raise StepFailed("one node alone was labelled, which hides the others")
        code, said = await cluster.label_gpus(url, *options)
        if code != 0:
            raise StepFailed(f"muster label-gpus: {said}")
        await cluster.until(f"{url}/api/v1/nodes", _all_labelled)
        return f"one node alone is refused, as it would hide the others; all at once: {said}"

    async def _judged_healthy(self) -> str:
        for node in layout.NODES:
            await self._watch.first(
                vocabulary.VerdictChanged,
                lambda e, name=node.name: (e.node, e.verdict) == (name, Verdict.HEALTHY),  # type: ignore[misc]
                since=0.0,
            )
        return f"{len(layout.NODES)} plugins HEALTHY"

    async def _noticed(
        self, node: str, harm: Callable[[], Awaitable[None]], verdict: Verdict
    ) -> str:
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

    async def _mended(self, node: str, mend: Callable[[], Awaitable[None]], kind: AlertKind) -> str:
        since = asyncio.get_running_loop().time()
        await mend()
        at, _ = await self._watch.first(
            vocabulary.VerdictChanged,
            lambda e: e.node == node and e.verdict == Verdict.HEALTHY,
            since=since,
        )
        told_s = await self._delivered(kind, node, AlertState.RESOLVED, since)
        return f"{node} HEALTHY after {at - since:.2f} s; resolution told after {told_s:.2f} s"

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
        await cluster.until(url, lambda nodes: _offers(nodes)[node].get(layout.GPU) == wanted)

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
        received = json.dumps(await cluster.get(f"{self._place.http('webhook')}/received"))
        if alert.fingerprint not in received:
            raise StepFailed(f"the webhook never got alert {alert.fingerprint}")
        return at - since

    def _script(self, node: str, fault: dict[str, int]) -> None:
        with self._place.faults(node).open("a") as script:
            script.write(json.dumps(fault) + "\n")

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, flush=True)


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


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
