"""Adapter: people: `muster demo` plays one story on the local stack and reports what was seen.

Every step has a deadline. The nodes, kubelets and GPUs are simulated, and the story says so.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

from muster.cli import bus_client, demo_steps
from muster.local import layout, nats, processes, stack
from muster.service import runtime
from muster.vocabulary import AlertKind, Verdict

_STEP_TIMEOUT_S: Final = 20.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a story. `seconds` is how long it took; `detail` is what was seen."""

    name: str
    ok: bool
    seconds: float
    detail: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A story as far as it was played; `ok` if every step came out."""

    ok: bool
    seconds: float
    steps: tuple[Step, ...]


def run(*, as_json: bool) -> int:
    """Play the story; return 0 if every step came out, 1 if one did not, 130 after Ctrl-C."""
    return tell(_on_a_stack, as_json=as_json)


def tell(play: "Callable[[Playing], Coroutine[object, object, None]]", *, as_json: bool) -> int:
    """Play a story and say what came of it; return the exit code."""
    demo = Playing(quiet=as_json)
    try:
        asyncio.run(runtime.run(play(demo)))
    except (nats.NatsUnavailable, processes.ProgramFailed) as error:
        demo.note(Step(name="start", ok=False, seconds=0.0, detail=str(error)))
    if not demo.complete and all(step.ok for step in demo.steps):
        print("muster demo: interrupted", file=sys.stderr)
        return 130
    report = summarize(demo.steps, complete=demo.complete)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        failed = [step.name for step in demo.steps if not step.ok]
        outcome = f"failed at: {', '.join(failed)}" if failed else "every step came out"
        print(f"\n{outcome}; {report.seconds} s")
    return 0 if report.ok else 1


class Playing:
    """One playing of the story: what came out so far, and whether that is all."""

    def __init__(self, *, quiet: bool) -> None:
        self.steps: list[Step] = []
        self.complete = False
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print a line, unless only the report is wanted."""
        if not self._quiet:
            print(text, flush=True)

    def note(self, step: Step) -> None:
        """Keep a step and print it."""
        self.steps.append(step)
        self.say(line(step, at_s=sum(s.seconds for s in self.steps)))

    def took(self, name: str, began: float, detail: str, *, ok: bool = True) -> None:
        """Note a step that ends now."""
        seconds = asyncio.get_running_loop().time() - began
        self.note(Step(name=name, ok=ok, seconds=seconds, detail=detail))

    async def play(self, chapters: Sequence[tuple[str, demo_steps.Act]]) -> None:
        """Play; stop at the first step that fails."""
        for name, act in chapters:
            began = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(_STEP_TIMEOUT_S):
                    self.took(name, began, await act())
            except TimeoutError:
                self.took(name, began, f"not seen within {_STEP_TIMEOUT_S:g} s", ok=False)
                return
            except (demo_steps.StepFailed, processes.ProgramFailed, OSError) as error:
                self.took(name, began, str(error), ok=False)
                return


async def _on_a_stack(demo: Playing) -> None:
    """Start the stack, play, end it."""
    demo.say(f"simulated: 3 nodes, their kubelets and {demo_steps.GPUS} GPUs; the rest is real\n")
    running = stack.Stack(say=lambda _: None, restart=False, nats_url=os.environ.get("NATS_URL"))
    clock = asyncio.get_running_loop().time
    began = clock()
    started = datetime.now(UTC)
    pids: set[int] = set()
    heard = bus_client.Watch()
    async with running:
        pids = running.pids()
        async with bus_client.everything(running.nats_url, heard.hear, since=started):
            demo.took("start", began, f"{len(pids)} processes")
            await demo.play(_chapters(running, demo_steps.Acts(running, heard)))
        pids |= running.pids()
        began = clock()
    left = [f"process {pid}" for pid in sorted(pids) if _is_there(pid)]
    left += [str(running.directory)] if running.directory.exists() else []
    detail = f"left: {', '.join(left)}" if left else "no process, no socket, no file left"
    demo.took("stop", began, detail, ok=not left)
    demo.complete = True


def _chapters(running: stack.Stack, played: demo_steps.Acts) -> list[tuple[str, demo_steps.Act]]:
    """Return the story: each fault on another node, noticed, delivered, mended, resolved."""
    a, b, c = (node.name for node in layout.NODES)
    plugin = {node.name: running.processes[f"plugin-{node.name}"] for node in layout.NODES}
    fuse = "a simulated one" if running.fuse_simulated else "this machine's own"

    async def freeze() -> None:
        plugin[b].signal(signal.SIGSTOP)

    async def thaw() -> None:
        plugin[b].signal(signal.SIGCONT)

    noticed, mended = played.noticed, played.mended
    return [
        *played.at_first(fuse, a),
        ("freeze_plugin", lambda: noticed(b, freeze, Verdict.STUCK)),
        ("thaw_plugin", lambda: mended(b, thaw, AlertKind.STUCK)),
        ("kill_plugin", lambda: noticed(c, plugin[c].kill, Verdict.PLUGIN_DOWN)),
        ("restart_plugin", lambda: mended(c, plugin[c].start, AlertKind.PLUGIN_DOWN)),
        *played.asked_for(a, b),
    ]


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def summarize(steps: list[Step], *, complete: bool) -> Report:
    """Return what the steps amount to; a story that was not played to its end is not ok."""
    return Report(
        ok=complete and all(step.ok for step in steps),
        seconds=round(sum(step.seconds for step in steps), 3),
        steps=tuple(msgspec.structs.replace(s, seconds=round(s.seconds, 3)) for s in steps),
    )


def line(step: Step, *, at_s: float) -> str:
    """Return a step as one line of the timeline; `at_s` counts from the start of the story."""
    mark = "ok    " if step.ok else "FAILED"
    return f"{at_s:6.1f} s  {mark} {step.name:<20} {step.seconds:5.2f} s  {step.detail}"
