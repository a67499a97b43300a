"""Adapter: people: `muster label-gpus` and `muster unlabel-gpus`: show, ask, write, read back."""

import argparse
import asyncio
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

import muster
from muster.commands import user_name
from muster.kubernetes import api
from muster_labeler import model
from muster_labeler.check import cluster_reader, findings, label_plan, report
from muster_labeler.check.findings import Exit
from muster_labeler.check.label_plan import Row, Step
from muster_labeler.cli import commands
from muster_labeler.kubernetes import cluster_api, pace
from muster_labeler.naming import node_labels, schemes, sources
from muster_labeler.naming.node_labels import LabelSet

_WRITERS: Final = 32
_RATE_MAX: Final = 1000.0
_ONE_TIMEOUT_S: Final = 10.0
_RIGHTS: Final = (
    cluster_api.Permission("list", "nodes"),
    cluster_api.Permission("get", "nodes"),
    cluster_api.Permission("patch", "nodes"),
)
_FAILURES_SHOWN_MAX: Final = 20


def run(chosen: argparse.Namespace) -> int:
    """Label or unlabel what was chosen; return the exit code."""
    if not 0 < chosen.rate <= _RATE_MAX:
        return commands.usage_error(
            chosen.command, f"--rate: more than 0 and at most {_RATE_MAX:g}"
        )
    try:
        known = commands.aliases(chosen.aliases)
        return asyncio.run(_run(chosen, known))
    except (commands.BadAliases, commands.UsageError) as error:
        return commands.usage_error(chosen.command, str(error))
    except (api.NoCluster, cluster_reader.Unreachable) as error:
        commands.print_error(chosen.command, str(error))
        return Exit.UNREACHABLE


async def _run(chosen: argparse.Namespace, aliases: dict[str, str]) -> int:
    is_writing = chosen.command == "unlabel-gpus" and not chosen.dry_run
    is_writing = is_writing or (chosen.command == "label-gpus" and chosen.apply)
    if chosen.command == "label-gpus" and chosen.features and (is_writing or not chosen.node):
        raise commands.UsageError("--features: name one --node, and do not --apply")
    async with await commands.connect(chosen) as api:
        read = cluster_reader.ClusterReader(
            api, timeout_s=chosen.timeout, progress=commands.progress_printer()
        )
        await read.check_access(_RIGHTS if is_writing else _RIGHTS[:1])
        forbidden = [one.why for one in read.unread if one.is_forbidden]
        if forbidden:
            commands.print_error(chosen.command, "; ".join(forbidden))
            return Exit.NO_RIGHTS
        found = await read.nodes()
        if found is None:
            commands.print_error(chosen.command, "; ".join(one.why for one in read.unread))
            is_forbidden = any(one.is_forbidden for one in read.unread)
            return Exit.NO_RIGHTS if is_forbidden else Exit.UNREACHABLE
        unknown = sorted(set(chosen.node or ()) - {node.name for node in found})
        if unknown:
            raise commands.UsageError(f"no such node: {', '.join(unknown)}")
        if chosen.command == "unlabel-gpus":
            rows, objection = label_plan.removals(found, only=chosen.node or ()), None
        else:
            rows, objection, views = await _planned(chosen, aliases, read, found)
        commands.progress_printer()("")
        if chosen.command == "label-gpus" and chosen.features:
            objection = _unheard(chosen, read.unread) or objection
            return write(chosen, rows, views, objection=objection)
        sys.stdout.write(label_plan.table(rows))
        if objection is None and is_writing:
            objection = _unheard(chosen, read.unread)
        elif read.unread:
            _unheard(chosen, read.unread)
        if objection is not None:
            commands.print_error(chosen.command, f"nothing is written: {objection}")
            is_unread = any(not one.is_forbidden for one in read.unread)
            return Exit.UNREACHABLE if is_unread else Exit.PROBLEMS
        judged = [node.name for node in found if node.has_condition]
        return await _carry_out(chosen, api, rows, is_writing=is_writing, judged=judged)


async def _planned(
    chosen: argparse.Namespace,
    aliases: dict[str, str],
    read: cluster_reader.ClusterReader,
    found: Sequence[model.Node],
) -> tuple[list[Row], str | None, sources.Evidence]:
    slices = await read.slices()
    agents, simulated = await read.reports(chosen.muster_namespace)
    views = sources.Evidence(
        agents,
        cluster_reader.gpus_by_node(slices),
        aliases,
        may_use_instance_type=chosen.from_instance_type,
    )
    fleet = node_labels.label_statuses(found, views)
    allowed = label_plan.Allowed(
        unknown=chosen.allow_unknown,
        ambiguous=chosen.force_ambiguous,
        instance_type=chosen.from_instance_type,
        overwrite=chosen.overwrite,
        partial=chosen.partial,
        simulated=chosen.simulated,
    )
    # every node writes its own file of features: together they are all
    only = () if chosen.features else chosen.node or ()
    rows = label_plan.plan(fleet, allowed, simulated=simulated, only=only)
    covering = node_labels.covering_scheme(fleet)
    objection = label_plan.objection(rows, allowed, covering=covering)
    return rows, f"{objection}; --partial" if objection else None, views


def _unheard(chosen: argparse.Namespace, unread: Sequence[findings.Unread]) -> str | None:
    """Tell what could not be seen; return why nothing may be written then."""
    for one in unread:
        commands.print_error(chosen.command, f"not seen: {one.why}")
    if not unread or (chosen.command == "label-gpus" and chosen.unheard):
        return None
    return "who knows best could not be heard; --unheard"


async def _carry_out(
    chosen: argparse.Namespace,
    api: api.Api,
    rows: Sequence[Row],
    *,
    is_writing: bool,
    judged: Sequence[str],
) -> int:
    """Do it; `judged` are the nodes with our condition."""
    work = [row for row in rows if row.step in {Step.WRITE, Step.REMOVE}]
    refused = [row for row in rows if row.step is Step.REFUSE]
    is_unlabelling = chosen.command == "unlabel-gpus"
    hidden = label_plan.unlabelled_after(rows) if is_unlabelling else []
    if work and hidden and len(hidden) < len(rows):
        commands.print_error(
            chosen.command, f"without the label SkyPilot does not see {_few(hidden)}"
        )
    is_emptying = is_unlabelling and chosen.objects
    if not work and not is_emptying:
        return Exit.PROBLEMS if refused else Exit.FINE
    if not is_writing:
        how = "without --dry-run it is done" if is_unlabelling else "--apply does it"
        commands.print_error(chosen.command, f"{len(work)} nodes would be written; {how}")
        return Exit.FINE
    if not chosen.yes and not await _agreed(chosen, api, len(work)):
        return Exit.USAGE if not sys.stdin.isatty() else Exit.PROBLEMS
    turns = pace.WritePace(chosen.rate)
    door = cluster_api.NodeApi(api, turns, timeout_s=_ONE_TIMEOUT_S)
    failures = await _written(chosen, door, work)
    done = len(work) - len(failures)
    for node, failure in failures[:_FAILURES_SHOWN_MAX]:
        what = "gone meanwhile" if failure.is_gone else failure.text
        commands.print_error(chosen.command, f"{node}: {what}")
    if len(failures) > _FAILURES_SHOWN_MAX:
        commands.print_error(chosen.command, f"and {len(failures) - _FAILURES_SHOWN_MAX} more")
    sys.stdout.write(f"{done} of {len(work)} nodes written and read back\n")
    broken = [failure.text for _, failure in failures if not failure.is_gone]
    if is_emptying:
        left = await cluster_api.remove_objects(
            api,
            turns,
            nodes=judged,
            namespace=chosen.muster_namespace,
            timeout_s=_ONE_TIMEOUT_S,
        )
        for text in left:
            commands.print_error(chosen.command, text)
        broken.extend(left)
    return Exit.PROBLEMS if broken or refused else Exit.FINE


async def _agreed(chosen: argparse.Namespace, api: api.Api, count: int) -> bool:
    """Ask a person; nobody is asked where there is no terminal."""
    if not sys.stdin.isatty():
        commands.print_error(chosen.command, f"{count} nodes: this is no terminal; say --yes")
        return False
    where = f"{api.server} (context {api.context})" if api.context else api.server
    do = "Remove our labels from" if chosen.command == "unlabel-gpus" else "Label"
    return await agreed(report.plain(f"{do} {count} nodes of {where}?"))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")  # noqa: PLR2004


async def _written(
    chosen: argparse.Namespace, door: cluster_api.NodeApi, work: Sequence[Row]
) -> list[tuple[str, cluster_api.Failure]]:
    """Write every node, several at a time and no faster than allowed; return what failed."""
    queue = list(reversed(work))
    failures: list[tuple[str, cluster_api.Failure]] = []
    say = commands.progress_printer()
    actor = f"{user_name()} with muster {chosen.command}"

    async def write() -> None:
        while queue:
            row = queue.pop()
            done = await _one(chosen, door, row, actor)
            if isinstance(done, cluster_api.Failure):
                failures.append((row.node, done))
            say(f"{len(work) - len(queue)} of {len(work)} nodes")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(_WRITERS, len(work))):
            tasks.create_task(write())
    say("")
    return sorted(failures, key=lambda failed: failed[0])


async def _one(
    chosen: argparse.Namespace, door: cluster_api.NodeApi, row: Row, actor: str
) -> model.Node | cluster_api.Failure:
    if row.step is Step.REMOVE:
        return await door.unlabel(row.status.node)
    assert row.new is not None, "what is written has a value"
    at = datetime.now(UTC).isoformat(timespec="seconds")
    written = node_labels.provenance(
        row.status, row.new, actor=actor, version=muster.__version__, at=at
    )
    force = chosen.overwrite and bool(row.status.other_owners)
    return await door.label(
        row.status.node,
        {schemes.SKYPILOT: row.new},
        provenance=msgspec.json.encode(written).decode(),
        force=force,
    )


async def agreed(question: str) -> bool:
    """Ask until a line comes; only `y` or `yes` is yes.

    By the loop and not in a thread: who interrupts the question would wait for that thread.
    """
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
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


_SETS: Final = (LabelSet.SKYPILOT, LabelSet.MUSTER)


def write(
    chosen: argparse.Namespace,
    rows: Sequence[Row],
    views: sources.Evidence,
    *,
    objection: str | None,
) -> int:
    """Write the labels of the one node that was named; none where it must have none."""
    (name,) = chosen.node
    row = next((row for row in rows if row.node == name), None)
    refusal = objection or (row.reason if row is not None and row.step is Step.REFUSE else None)
    labels = {}
    if row is not None and row.new is not None and refusal is None:
        kinds = views.agents.get(name, {})
        labels = node_labels.wanted_labels(_SETS, row.new, kinds=kinds, gpus=None)
    text = node_labels.feature_file(labels)
    if chosen.features == "-":
        sys.stdout.write(text)
    else:
        _replace(pathlib.Path(chosen.features), text)
    if refusal is not None:
        commands.print_error(chosen.command, f"{name}: no label: {refusal}")
    return Exit.PROBLEMS if refusal else Exit.FINE


def _replace(file: pathlib.Path, text: str) -> None:
    """Write a file that nobody can read half of: NFD leaves out names that begin with a dot."""
    try:
        if file.exists() and file.read_text("utf-8") == text:
            return
        half, name = tempfile.mkstemp(dir=file.parent, prefix=".muster-")
        try:
            with os.fdopen(half, "w", encoding="utf-8") as opened:
                opened.write(text)
            pathlib.Path(name).chmod(0o644)
            pathlib.Path(name).replace(file)
        except OSError:
            with contextlib.suppress(OSError):
                pathlib.Path(name).unlink()
            raise
    except OSError as error:
        raise commands.UsageError(f"{file}: {error.strerror or error}") from None
