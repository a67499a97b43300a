"""Adapter for the terminal: `muster demo` runs a scripted scenario on the local stack.

Every step has a deadline. The nodes, kubelets and GPUs are simulated, and the output states this.

`python -m muster.cli.demo` plays the scenario in one of the containers of compose.yaml. A container
cannot send signals to the others, so there the scenario has only faults that the stand-ins can
cause on request.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import cyclopts
import msgspec

from muster.cli import demo_steps, events, output
from muster.local import nats, processes, stack
from muster.service import runtime
from muster.vocabulary import AlertKind, Verdict

app = cyclopts.App(name="demo")

_STEP_TIMEOUT_S: Final = 20.0
_FAULTS: Final = Path("/faults")
_EVENTS_AGE: Final = timedelta(hours=1)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a scenario. `seconds` is its duration, and `detail` describes its result."""

    name: str
    ok: bool
    seconds: float
    detail: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a scenario that were played; `ok` is True if all were played and succeeded."""

    ok: bool
    seconds: float
    steps: tuple[Step, ...]


@app.default
def demo(*, json: output.Json = False) -> int:
    """Run one scenario with faults, verdicts, notifications, recovery and timings, and exit.

    The exit code is 0 if every step succeeded, 1 if one failed, 130 after Ctrl-C.
    """
    return run(_on_a_stack, as_json=json)


def run(play: "Callable[[Scenario], Coroutine[object, object, None]]", *, as_json: bool) -> int:
    """Play a scenario and print the result; return the exit code."""
    scenario = Scenario(quiet=as_json)
    try:
        asyncio.run(runtime.run(play(scenario)))
    except (nats.NatsUnavailable, processes.ProgramFailed) as error:
        scenario.append(Step(name="start", ok=False, seconds=0.0, detail=str(error)))
    failed = [step.name for step in scenario.steps if not step.ok]
    if not (scenario.is_complete or failed):
        return output.fail("demo", "interrupted", code=130)
    report = scenario.report()
    if as_json:
        output.print_json(report, indent=2)
    else:
        outcome = f"failed at: {', '.join(failed)}" if failed else "every step succeeded"
        output.show("", f"{outcome}; {report.seconds} s")
    return 0 if report.ok else 1


class Scenario:
    """A scenario that is being played: its steps so far, and whether it is complete."""

    def __init__(self, *, quiet: bool) -> None:
        self.steps: list[Step] = []
        self.is_complete = False
        self._is_quiet = quiet

    def print(self, line: str) -> None:
        """Print a text, unless the scenario is quiet."""
        if not self._is_quiet:
            output.show(*line.split("\n"))

    def append(self, step: Step) -> None:
        """Store a step, and print it with the time since the start of the scenario."""
        self.steps.append(step)
        at_s = sum(step.seconds for step in self.steps)
        outcome = "ok    " if step.ok else "FAILED"
        name = f"{step.name:<20} {step.seconds:5.2f} s"
        self.print(f"{at_s:6.1f} s  {outcome} {name}  {step.detail}")

    def add(self, name: str, started: float, detail: str, *, ok: bool = True) -> None:
        """Store and print a step that has just ended, with its duration."""
        seconds = asyncio.get_running_loop().time() - started
        self.append(Step(name=name, ok=ok, seconds=seconds, detail=detail))

    async def play(self, steps: Sequence[tuple[str, demo_steps.Play]]) -> None:
        """Play steps; stop at the first that fails."""
        for name, play in steps:
            started = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(_STEP_TIMEOUT_S):
                    self.add(name, started, await play())
            except TimeoutError:
                self.add(name, started, f"not done within {_STEP_TIMEOUT_S:g} s", ok=False)
                return
            except (demo_steps.StepFailed, processes.ProgramFailed, OSError) as error:
                self.add(name, started, str(error), ok=False)
                return

    def report(self) -> Report:
        """Return the report; an incomplete scenario is not ok."""
        return Report(
            ok=self.is_complete and all(step.ok for step in self.steps),
            seconds=round(sum(step.seconds for step in self.steps), 3),
            steps=tuple(
                msgspec.structs.replace(step, seconds=round(step.seconds, 3)) for step in self.steps
            ),
        )


async def _on_a_stack(scenario: Scenario) -> None:
    """Start the stack, play the scenario, stop the stack."""
    scenario.print(
        f"simulated: 3 nodes, their kubelets and {demo_steps.GPUS} GPUs; everything else is real\n"
    )
    running = stack.Stack(show=lambda _: None, restart=False, nats_url=os.environ.get("NATS_URL"))
    clock = asyncio.get_running_loop().time
    started, since = clock(), datetime.now(UTC)
    recorder = events.Recorder()
    async with running:
        pids = running.pids()
        async with events.subscribe_all(running.nats_url, recorder.record, since=since):
            scenario.add("start", started, f"{len(pids)} processes")
            await scenario.play(_steps(running, demo_steps.Steps(running, recorder)))
        pids |= running.pids()
        started = clock()
    left = [f"process {pid}" for pid in sorted(pids) if _is_running(pid)]
    left += [str(running.directory)] if running.directory.exists() else []
    detail = f"left behind: {', '.join(left)}" if left else "no process, socket or file left"
    scenario.add("stop", started, detail, ok=not left)
    scenario.is_complete = True


class Containers:
    """The containers in which the programs run."""

    def http(self, name: str) -> str:
        """Return the HTTP address of a container."""
        return f"http://{name}:8080"

    def faults(self, node: str) -> Path:
        """Return the fault script of a node's simulated GPUs."""
        return _FAULTS / f"{node}.jsonl"


async def _on_containers(scenario: Scenario) -> None:
    """Play the scenario on containers that already run, and leave them running."""
    scenario.print(
        f"simulated: 3 nodes, their kubelets and {demo_steps.GPUS} GPUs; everything else is real\n"
    )
    containers = Containers()
    started = asyncio.get_running_loop().time()
    since = datetime.now(UTC) - _EVENTS_AGE
    pod = f"{containers.http('kubernetes')}/api/v1/namespaces/default/pods/{demo_steps.POD}"
    a, b, _ = (node.name for node in stack.NODES)
    recorder = events.Recorder()
    steps = demo_steps.Steps(containers, recorder)
    async with events.subscribe_all(os.environ["NATS_URL"], recorder.record, since=since):
        scenario.add("connect", started, "to NATS, as admin")
        try:
            await scenario.play([*steps.healthy("a simulated one", a), *steps.on_request(a, b)])
        finally:
            with contextlib.suppress(OSError):
                await demo_steps.delete(f"{pod}?gracePeriodSeconds=0")
    scenario.is_complete = True


def _steps(running: stack.Stack, steps: demo_steps.Steps) -> list[tuple[str, demo_steps.Play]]:
    """Return the steps, which cause faults on different nodes, await detection, and repair them."""
    a, b, c = (node.name for node in stack.NODES)
    plugin = {node.name: running.processes[f"plugin-{node.name}"] for node in stack.NODES}
    fuse = "a simulated one" if running.fuse_simulated else "this machine's own"

    async def freeze() -> None:
        plugin[b].signal(signal.SIGSTOP)

    async def thaw() -> None:
        plugin[b].signal(signal.SIGCONT)

    return [
        *steps.healthy(fuse, a),
        ("freeze_plugin", lambda: steps.detect(b, freeze, Verdict.STUCK)),
        ("thaw_plugin", lambda: steps.recover(b, thaw, AlertKind.STUCK)),
        ("kill_plugin", lambda: steps.detect(c, plugin[c].kill, Verdict.PLUGIN_DOWN)),
        ("restart_plugin", lambda: steps.recover(c, plugin[c].start, AlertKind.PLUGIN_DOWN)),
        *steps.on_request(a, b),
    ]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(run(_on_containers, as_json=False))
