"""Adapter for processes and files: `muster break` causes faults in the running `muster up`.

`muster mend` undoes them. `faults` defines the steps; this module signals processes, sends requests
to the stand-ins and writes the fault scripts of the simulated GPUs.
"""

import contextlib
import http.client
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, assert_never

import cyclopts
import msgspec
import orjson
from cyclopts import Parameter

from muster.cli import faults, output
from muster.local import running

break_app = cyclopts.App(name="break")
mend_app = cyclopts.App(name="mend")

_TIMEOUT_S: Final = 5.0
_BYTES_MAX: Final = 1024 * 1024
_NOT_FOUND: Final = 404


class CannotBreak(Exception):
    """A fault cannot be caused or undone now; the message gives the reason."""


def _named(_: Any, tokens: Any) -> faults.Fault:
    return faults.fault(tokens[0].value)


Fault = Annotated[faults.Fault | None, Parameter(converter=_named)]
Directory = Annotated[
    Path | None,
    Parameter(
        help="The directory that `muster up` printed after `settings, logs`; needed if "
        "several instances are running."
    ),
]


@break_app.default
def break_(fault: Fault = None, node: str | None = None, /, *, directory: Directory = None) -> int:
    """Cause a fault in the running `muster up`; without a fault, list the faults.

    Parameters
    ----------
    fault
        The fault to cause.
    node
        The node of the fault; by default the last one, and for `xid` one where a pod has a GPU.

    """
    if fault is None:
        _list([each for each in running.here() if _is_meant(each, directory)])
        return 0
    return _act("break", directory, lambda record: _break(record, fault, node))


@mend_app.default
def mend(fault: Fault = None, node: str | None = None, /, *, directory: Directory = None) -> int:
    """Undo the faults that `muster break` caused: all, or only those that are named.

    Parameters
    ----------
    fault
        Undo only this fault.
    node
        Undo it only on this node.

    """
    return _act("mend", directory, lambda record: _mend(record, fault, node))


def _list(stacks: list[running.Running]) -> None:
    made = {at.fault: at for at in faults.targets(running.faults(stacks[0]))} if stacks else {}
    rows = []
    for fault in faults.Fault:
        plan = faults.plan(faults.Target(fault))
        name = f"{fault} [NODE]" if fault.is_of_node else str(fault)
        rows.append([name, plan.breaks, plan.seen, "yes" if fault in made else ""])
    output.table(["fault", "what breaks", "what you see", "active"], rows, nothing="")
    if not stacks:
        output.show("", "no `muster up` of yours is running")


def _act(command: str, directory: Path | None, act: Callable[[running.Running], None]) -> int:
    """Call `act` with the only running stack, or the one in `directory`; return the exit code."""
    stacks = [each for each in running.here() if _is_meant(each, directory)]
    if not stacks:
        where = f" in {directory}" if directory else ""
        return output.fail(
            command, f"no `muster up` of yours is running{where}; start it first", code=1
        )
    if len(stacks) > 1:
        places = ", ".join(each.directory for each in stacks)
        text = f"several instances of `muster up` run; choose one with --directory: {places}"
        return output.fail(command, text)
    try:
        act(stacks[0])
    except faults.UnknownName as error:
        return output.fail(command, str(error))
    except CannotBreak as error:
        return output.fail(command, str(error), code=1)
    return 0


def _is_meant(record: running.Running, directory: Path | None) -> bool:
    return directory is None or Path(record.directory) == directory.absolute()


def _break(record: running.Running, fault: faults.Fault, node: str | None) -> None:
    if fault is faults.Fault.XID and node is None:
        node = _node_with_pod(record)
    target = faults.target(fault, node, _nodes(record))
    plan = faults.plan(target)
    if plan.undoing:
        # first, so that `muster mend` also undoes a fault of which only the first steps succeeded
        running.add_fault(record, str(target))
    for step in plan.steps:
        _take(record, step)
    watch, undo = plan.watch, f"muster mend {target}"
    health = record.program("health")
    if len(running.here()) > 1 and health is not None:
        watch = faults.reaching(watch, health=health.http, nats_url=record.nats_url)
        undo += f" --directory {record.directory}"
    undo = undo if plan.undoing else "not needed: muster repairs this itself"
    output.show(
        f"broken  {target}: {plan.breaks}",
        f"see     {plan.seen}",
        f"watch   {watch}",
        f"undo    {undo}",
    )


def _mend(record: running.Running, fault: faults.Fault | None, node: str | None) -> None:
    if fault is not None:
        faults.target(fault, node, _nodes(record))
    left, problems = [], []
    is_mended = False
    for target in faults.targets(running.faults(record)):
        if fault not in {None, target.fault} or node not in {None, target.node}:
            left.append(str(target))
            continue
        try:
            for step in faults.plan(target).undoing:
                _take(record, step)
        except CannotBreak as error:
            # that one is mended by the next attempt
            problems.append(f"{target}: {error}")
            continue
        running.remove_fault(record, str(target))
        output.show(f"mended  {target}")
        is_mended = True
    if problems:
        raise CannotBreak("; ".join(problems))
    if not is_mended:
        others = f"; still broken: {', '.join(left)}" if left else ""
        output.show(f"nothing to mend{others}")


def _nodes(record: running.Running) -> list[str]:
    return [node.name for node in record.nodes]


def _take(record: running.Running, step: faults.Step) -> None:
    """Execute one step. Raises CannotBreak."""
    match step:
        case faults.Freeze():
            _signal(record, step.program, signal.SIGSTOP)
        case faults.Thaw():
            # what has ended meanwhile is not suspended
            with contextlib.suppress(CannotBreak):
                _signal(record, step.program, signal.SIGCONT)
        case faults.End():
            _pid(record, step.program)
            # first, because the process that runs the stack starts what has ended
            running.hold(record, step.program)
            _signal(record, step.program, signal.SIGKILL)
        case faults.Start():
            running.release(record, step.program)
        case faults.Ask():
            _ask(record, step.program, step.path, method="POST")
        case faults.RemoveSocket():
            for path in Path(record.directory, step.node, "device-plugins").glob("muster-*.sock"):
                path.unlink(missing_ok=True)
        case faults.BreakGpu():
            gpu = _gpu(record, step.node)
            with _script(record, step.node).open("ab") as file:
                file.write(orjson.dumps({"device": gpu, "xid": step.xid}) + b"\n")
        case faults.RepairGpus():
            _script(record, step.node).write_bytes(b"")
        case _:
            assert_never(step)


def _script(record: running.Running, node: str) -> Path:
    return Path(record.directory, f"faults-{node}.jsonl")


def _signal(record: running.Running, program: str, number: signal.Signals) -> None:
    try:
        os.kill(_pid(record, program), number)
    except ProcessLookupError:
        raise CannotBreak(f"{program} has just ended; try again") from None


def _pid(record: running.Running, name: str) -> int:
    program = record.program(name)
    if program is None:
        raise CannotBreak(f"{name} is not a program of this `muster up`")
    if program.pid is None:
        raise CannotBreak(f"{name} is not running: {program.problem}")
    return program.pid


def _ask(record: running.Running, name: str, path: str, *, method: str) -> bytes:
    program = record.program(name)
    url = f"{program.http}{path}" if program else path
    request = urllib.request.Request(url, method=method)  # noqa: S310  # our own stand-ins
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # the same
            body: bytes = answer.read(_BYTES_MAX)
            return body
    except urllib.error.HTTPError as error:
        with error:
            if error.code == _NOT_FOUND and method == "POST":
                return b""  # the stream that is to be dropped is not open
            raise CannotBreak(f"{name} answered {method} {path} with HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        raise CannotBreak(f"{name} does not answer: {error}") from None


class _Allocation(msgspec.Struct):
    ids: list[str] = []


class _Resource(msgspec.Struct):
    devices: dict[str, str] = {}
    allocations: list[_Allocation] = []


class _Kubelet(msgspec.Struct):
    resources: dict[str, _Resource] = {}


def _gpus(record: running.Running, node: str) -> _Resource:
    body = _ask(record, f"kubelet-{node}", "/state", method="GET")
    return msgspec.json.decode(body, type=_Kubelet).resources.get(faults.GPU, _Resource())


def _gpu(record: running.Running, node: str) -> str:
    """Return a working GPU's id, preferably of one that a pod uses. Raises CannotBreak."""
    gpus = _gpus(record, node)
    of_pods = [gpu for allocation in gpus.allocations for gpu in allocation.ids]
    for gpu in [*of_pods, *sorted(gpus.devices)]:
        if gpus.devices.get(gpu) == "Healthy":
            return gpu
    raise CannotBreak(f"{node} has no GPU that still works")


def _node_with_pod(record: running.Running) -> str | None:
    """Return a node where a pod has a GPU that works, or None."""
    for node in record.nodes:
        with contextlib.suppress(CannotBreak):
            gpus = _gpus(record, node.name)
            ids = [gpu for allocation in gpus.allocations for gpu in allocation.ids]
            if any(gpus.devices.get(gpu) == "Healthy" for gpu in ids):
                return node.name
    return None
