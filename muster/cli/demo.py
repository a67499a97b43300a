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

from muster.cli import acts, story, watch
from muster.local import layout, nats, processes, stack
from muster.service import runtime
from muster.vocabulary import AlertKind, Verdict

_STEP_TIMEOUT_S: Final = 20.0


def run(*, as_json: bool) -> int:
    """Play the story; return 0 if every step came out, 1 if one did not, 130 after Ctrl-C."""
    return tell(_on_a_stack, as_json=as_json)


def tell(play: "Callable[[Playing], Coroutine[object, object, None]]", *, as_json: bool) -> int:
    """Play a story and say what came of it; return the exit code."""
    demo = Playing(quiet=as_json)
    try:
        asyncio.run(runtime.run(play(demo)))
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


class Playing:
    """One playing of the story: what came out so far, and whether that is all."""

    def __init__(self, *, quiet: bool) -> None:
        self.steps: list[story.Step] = []
        self.complete = False
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print a line, unless only the report is wanted."""
        if not self._quiet:
            print(text, flush=True)

    def note(self, step: story.Step) -> None:
        """Keep a step and print it."""
        self.steps.append(step)
        self.say(story.line(step, at_s=sum(s.seconds for s in self.steps)))

    def took(self, name: str, began: float, detail: str, *, ok: bool = True) -> None:
        """Note a step that ends now."""
        seconds = asyncio.get_running_loop().time() - began
        self.note(story.Step(name=name, ok=ok, seconds=seconds, detail=detail))

    async def play(self, chapters: Sequence[tuple[str, acts.Act]]) -> None:
        """Play; stop at the first step that fails."""
        for name, act in chapters:
            began = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(_STEP_TIMEOUT_S):
                    self.took(name, began, await act())
            except TimeoutError:
                self.took(name, began, f"not seen within {_STEP_TIMEOUT_S:g} s", ok=False)
                return
            except (acts.StepFailed, processes.ProgramFailed, OSError) as error:
                self.took(name, began, str(error), ok=False)
                return


async def _on_a_stack(demo: Playing) -> None:
    """Start the stack, play, end it."""
    demo.say(f"simulated: 3 nodes, their kubelets and {acts.GPUS} GPUs; the rest is real\n")
    running = stack.Stack(say=lambda _: None, restart=False, nats_url=os.environ.get("NATS_URL"))
    clock = asyncio.get_running_loop().time
    began = clock()
    started = datetime.now(UTC)
    pids: set[int] = set()
    heard = watch.Watch()
    async with running:
        pids = running.pids()
        async with watch.everything(running.nats_url, heard.hear, since=started):
            demo.took("start", began, f"{len(pids)} processes")
            await demo.play(_chapters(running, acts.Acts(running, heard)))
        pids |= running.pids()
        began = clock()
    left = [f"process {pid}" for pid in sorted(pids) if _is_there(pid)]
    left += [str(running.directory)] if running.directory.exists() else []
    detail = f"left: {', '.join(left)}" if left else "no process, no socket, no file left"
    demo.took("stop", began, detail, ok=not left)
    demo.complete = True


def _chapters(running: stack.Stack, played: acts.Acts) -> list[tuple[str, acts.Act]]:
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
