"""Adapter for the command line: `muster label-gpus` and `unlabel-gpus` plan and write labels."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import muster
from muster import commands, escaping, wording
from muster.cli import output
from muster.kubernetes import api as kubernetes_api
from muster_labeler import model
from muster_labeler.check import cluster_reader, findings, label_plan
from muster_labeler.check.findings import Exit
from muster_labeler.check.label_plan import Row, Step
from muster_labeler.cli import options
from muster_labeler.kubernetes import cluster_api
from muster_labeler.naming import accelerators, node_labels, sources
from muster_labeler.naming.node_labels import LabelSet

_WRITERS: Final = 32
_RATE_MAX: Final = 1000.0
_WRITE_TIMEOUT_S: Final = 10.0
_READING: Final = (cluster_api.Permission("list", "nodes"),)
_WRITING: Final = (
    *_READING,
    cluster_api.Permission("get", "nodes"),
    cluster_api.Permission("patch", "nodes"),
)
_FAILURES_SHOWN_MAX: Final = 20
_NO_GPU_NODES: Final = "the cluster has no GPU nodes"
_NOTHING_TO_REMOVE: Final = "nothing to remove: no node has labels that muster wrote"
_COLUMNS: Final = ("node", "gpu", "source", "current", "new", "step", "reason")
_FEATURES: Final = (LabelSet.SKYPILOT, LabelSet.MUSTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to label nodes as `label` allows, or to remove labels if `label` is None."""

    command: str
    cluster: options.ClusterOptions
    write: options.WriteOptions
    is_writing: bool
    label: label_plan.Allowed | None = None
    features: str | None = None
    has_objects: bool = False


def run(request: Request) -> int:
    """Label or unlabel nodes; return the exit code. Raises UsageError."""
    if not 0 < request.write.rate <= _RATE_MAX:
        raise options.UsageError(f"--rate must be greater than 0 and at most {_RATE_MAX:g}")
    if request.features and (request.is_writing or len(request.write.node) != 1):
        raise options.UsageError("--features requires exactly one --node, and no --apply")
    aliases = options.aliases(request.cluster.aliases)
    try:
        return asyncio.run(carry_out(request, aliases))
    except (kubernetes_api.NoCluster, cluster_reader.Unreachable) as error:
        return output.fail(request.command, str(error), code=Exit.UNREACHABLE)


async def carry_out(request: Request, aliases: dict[str, str]) -> int:
    """Label or unlabel nodes; return the exit code.

    Raises UsageError, NoCluster and Unreachable.
    """
    command = request.command
    async with await options.connect(request.cluster) as api:
        reader = cluster_reader.ClusterReader(
            api, timeout_s=request.cluster.timeout, progress=output.progress
        )
        await reader.check_access(_WRITING if request.is_writing else _READING)
        forbidden = [entry.why for entry in reader.unread if entry.is_forbidden]
        if forbidden:
            return output.fail(command, "; ".join(forbidden), code=Exit.NO_PERMISSION)
        nodes = await reader.nodes()
        if nodes is None:
            is_forbidden = any(entry.is_forbidden for entry in reader.unread)
            code = Exit.NO_PERMISSION if is_forbidden else Exit.UNREACHABLE
            return output.fail(command, "; ".join(e.why for e in reader.unread), code=code)
        unknown = sorted(set(request.write.node) - {node.name for node in nodes})
        if unknown:
            raise options.UsageError(f"no such node: {', '.join(unknown)}")
        objection, evidence = None, sources.NO_EVIDENCE
        if request.label is None:
            rows = label_plan.removals(nodes, only=request.write.node)
        else:
            evidence, simulated = await _evidence(request, aliases, reader)
            rows, objection = _planned(request, request.label, nodes, evidence, simulated)
        output.progress("")
        if request.features:
            objection = _unread(request, reader.unread) or objection
            return _write_features(request, rows, evidence, objection=objection)
        if not request.write.json:
            _print_table(request, rows)
        unread = _unread(request, reader.unread)
        if request.is_writing:
            objection = objection or unread
        if objection is not None:
            _print_result(request, rows, [], {})
            is_unread = any(not entry.is_forbidden for entry in reader.unread)
            code = Exit.UNREACHABLE if is_unread else Exit.PROBLEMS
            return output.fail(command, f"nothing was written: {objection}", code=code)
        with_condition = [node for node in nodes if node.has_condition]
        return await _write_all(request, api, rows, with_condition=with_condition)


async def _evidence(
    request: Request, aliases: dict[str, str], reader: cluster_reader.ClusterReader
) -> tuple[sources.Evidence, frozenset[str]]:
    """Return the reports of plugins and DRA about the GPUs, and the names of simulated nodes."""
    slices = await reader.slices()
    agents, simulated = await reader.reports(request.cluster.muster_namespace)
    evidence = sources.Evidence(
        agents,
        cluster_reader.gpus_by_node(slices),
        aliases,
        may_use_instance_type=request.label is not None and request.label.from_instance_type,
    )
    return evidence, simulated


def _planned(
    request: Request,
    allowed: label_plan.Allowed,
    nodes: Sequence[model.Node],
    evidence: sources.Evidence,
    simulated: frozenset[str],
) -> tuple[list[Row], str | None]:
    """Return the planned rows, and why nothing may be written, or None."""
    statuses = node_labels.label_statuses(nodes, evidence)
    # every node writes its own feature file: together the files label all nodes
    only = () if request.features else request.write.node
    rows = label_plan.plan(statuses, allowed, simulated=simulated, only=only)
    covering = node_labels.covering_scheme(statuses)
    objection = label_plan.objection(rows, allowed, covering=covering)
    return rows, f"{objection}; pass --partial" if objection else None


def _unread(request: Request, unread: Sequence[findings.Unread]) -> str | None:
    """Print the objects that could not be read; return why that forbids writing, or None."""
    for entry in unread:
        output.warn(request.command, f"could not be read: {entry.why}")
    if not unread or (request.label and request.label.unheard):
        return None
    return "the best sources about the GPUs could not be read; pass --unheard to ignore that"


async def _write_all(
    request: Request,
    api: kubernetes_api.Api,
    rows: Sequence[Row],
    *,
    with_condition: Sequence[model.Node],
) -> int:
    """Write the planned rows after confirmation, or only print them; return the exit code.

    `with_condition` are the nodes that have muster's condition.
    """
    work = [row for row in rows if row.step in {Step.WRITE, Step.REMOVE}]
    is_refused = any(row.step is Step.REFUSE for row in rows)
    is_unlabelling = request.label is None
    hidden = label_plan.unlabelled_after(rows) if is_unlabelling else []
    if work and hidden and len(hidden) < len(rows):
        output.warn(
            request.command, f"without the label, SkyPilot does not see {label_plan.some(hidden)}"
        )
    if not work and not request.has_objects:
        _print_result(request, rows, [], {})
        return Exit.PROBLEMS if is_refused else Exit.FINE
    if not request.is_writing:
        how = "run the command without --dry-run" if is_unlabelling else "--apply writes them"
        output.warn(
            request.command, f"{wording.counted(len(work), 'node')} would be written; {how}"
        )
        _print_result(request, rows, [], {})
        return Exit.FINE
    verb = "Remove muster's labels from" if is_unlabelling else "Label"
    action = f"{verb} {wording.counted(len(work), 'node')} of"
    if not request.write.yes and not await is_confirmed(request.command, api, action):
        return Exit.USAGE if not sys.stdin.isatty() else Exit.PROBLEMS
    write_pace = cluster_api.WritePace(request.write.rate)
    node_api = cluster_api.NodeApi(api, write_pace, timeout_s=_WRITE_TIMEOUT_S)
    failures = await _write(request, node_api, work)
    texts = {n: "deleted in the meantime" if f.is_gone else f.text for n, f in failures.items()}
    for node in list(texts)[:_FAILURES_SHOWN_MAX]:
        output.warn(request.command, f"{node}: {texts[node]}")
    if len(texts) > _FAILURES_SHOWN_MAX:
        output.warn(request.command, f"and {len(texts) - _FAILURES_SHOWN_MAX} more")
    _print_result(request, rows, work, texts)
    is_failed = any(not failure.is_gone for failure in failures.values())
    if request.has_objects:
        refused = [await node_api.remove_condition(node) for node in with_condition]
        left = [failure.text for failure in refused if failure and not failure.is_gone]
        left += await cluster_api.remove_objects(
            api,
            write_pace,
            namespace=request.cluster.muster_namespace,
            timeout_s=_WRITE_TIMEOUT_S,
        )
        for text in left:
            output.warn(request.command, text)
        is_failed = is_failed or bool(left)
    return Exit.PROBLEMS if is_failed or is_refused else Exit.FINE


def _print_table(request: Request, rows: Sequence[Row]) -> None:
    if not rows:
        is_removal = request.label is None
        output.show(_NOTHING_TO_REMOVE if is_removal else _NO_GPU_NODES)
        return
    output.show(*output.aligned(label_plan.table(rows)), *label_plan.summary(rows))


def _print_result(
    request: Request, rows: Sequence[Row], work: Sequence[Row], failed: dict[str, str]
) -> None:
    written = len(work) - len(failed)
    if request.write.json:
        nodes = [{column: getattr(row, column) for column in _COLUMNS} for row in rows]
        output.print_json({"nodes": nodes, "written": written, "failed": failed}, indent=2)
    elif work:
        nodes_text = wording.counted(len(work), "node")
        output.show(f"labels changed on {written} of {nodes_text}, and read back to verify")


async def is_confirmed(command: str, api: kubernetes_api.Api, action: str) -> bool:
    """Ask for confirmation on the terminal; without a terminal the answer is no."""
    question = f"{action} {api.name}?"
    if not sys.stdin.isatty():
        output.warn(command, f"{question} stdin is not a terminal; use --yes")
        return False
    return await _ask(question)


async def _ask(question: str) -> bool:
    """Ask a question on the terminal; only `y` and `yes` mean yes.

    The event loop reads the answer, not a thread, so that Ctrl-C ends the command immediately.
    """
    output.ask(f"{question} [y/N]")
    loop, file = asyncio.get_running_loop(), sys.stdin.fileno()
    answer: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        loop.remove_reader(file)
        answer.set_result(sys.stdin.readline())

    loop.add_reader(file, read)
    try:
        return (await answer).strip().lower() in {"y", "yes"}
    finally:
        loop.remove_reader(file)


async def _write(
    request: Request, node_api: cluster_api.NodeApi, work: Sequence[Row]
) -> dict[str, cluster_api.Failure]:
    """Write all nodes, several at a time within the rate limit; return the failures."""
    queue = list(reversed(work))
    failures: dict[str, cluster_api.Failure] = {}
    progress = output.progress
    actor = f"{commands.user_name()} with muster {request.command}"

    async def write() -> None:
        while queue:
            row = queue.pop()
            result = await _write_node(request, node_api, row, actor)
            if isinstance(result, cluster_api.Failure):
                failures[row.node] = result
            progress(f"{len(work) - len(queue)} of {wording.counted(len(work), 'node')}")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(_WRITERS, len(work))):
            tasks.create_task(write())
    progress("")
    return dict(sorted(failures.items()))


async def _write_node(
    request: Request, node_api: cluster_api.NodeApi, row: Row, actor: str
) -> model.Node | cluster_api.Failure:
    if request.label is None:
        return await node_api.unlabel(row.status.node)
    assert row.new is not None, "a label that is written has a value"
    at = datetime.now(UTC).isoformat(timespec="seconds")
    provenance = node_labels.provenance(
        row.status, row.new, actor=actor, version=muster.__version__, at=at
    )
    return await node_api.label(
        row.status.node,
        {accelerators.SKYPILOT: row.new},
        provenance=escaping.json_of(provenance),
        force=request.label.overwrite and bool(row.status.foreign_owners),
    )


def _write_features(
    request: Request,
    rows: Sequence[Row],
    evidence: sources.Evidence,
    *,
    objection: str | None,
) -> int:
    """Write one node's labels to a file for node-feature-discovery, or to standard output.

    NFD's worker reads the folder features.d on its node (NFD docs, customization guide: local
    feature source), so an agent on the node needs permission to read nodes, but not to write them.
    """
    assert request.features is not None, "a file was named"
    (name,) = request.write.node
    row = next((row for row in rows if row.node == name), None)
    refusal = objection or (row.reason if row is not None and row.step is Step.REFUSE else None)
    labels = {}
    if row is not None and row.new is not None and refusal is None:
        kinds = evidence.agents.get(name, {})
        labels = node_labels.wanted_labels(_FEATURES, row.new, kinds=kinds, gpus=None)
    text = node_labels.feature_file(labels)
    if request.features == "-":
        output.show(*text.splitlines())
    else:
        _replace(Path(request.features), text)
    if refusal is not None:
        output.warn(request.command, f"{name} gets no label: {refusal}")
    return Exit.PROBLEMS if refusal else Exit.FINE


def _replace(file: Path, text: str) -> None:
    """Replace a file atomically, from a temporary file that NFD ignores. Raises UsageError."""
    try:
        if file.exists() and file.read_text("utf-8") == text:
            return
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".muster-")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                opened.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise options.UsageError(f"{file}: {error.strerror or error}") from None
