"""Door to people: `muster label-gpus` and `muster unlabel-gpus`: show, ask, write, read back."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

import muster
from muster import kube, user
from muster_labeler import (
    access,
    facts,
    naming,
    nodes,
    options,
    pace,
    plan,
    schemes,
    sources,
    states,
    survey,
    tables,
)
from muster_labeler.findings import Exit
from muster_labeler.plan import Row, Step

_WRITERS: Final = 16
_ONE_TIMEOUT_S: Final = 10.0
_RIGHTS: Final = (
    access.Right("list", "nodes"),
    access.Right("get", "nodes"),
    access.Right("patch", "nodes"),
)
_FAILURES_SHOWN_MAX: Final = 20


def run(chosen: argparse.Namespace) -> int:
    """Label or unlabel what was chosen; return the exit code."""
    if chosen.rate <= 0:
        return options.mistake(chosen.command, "--rate: more than 0 nodes a second")
    try:
        known = naming.aliases(chosen.aliases)
        return asyncio.run(_run(chosen, known))
    except naming.BadAliases as error:
        return options.mistake(chosen.command, str(error))
    except (kube.NoCluster, survey.Unreachable) as error:
        options.tell(chosen.command, str(error))
        return Exit.UNREACHABLE


async def _run(chosen: argparse.Namespace, aliases: dict[str, str]) -> int:
    is_writing = chosen.command == "unlabel-gpus" and not chosen.dry_run
    is_writing = is_writing or (chosen.command == "label-gpus" and chosen.apply)
    async with await options.api(chosen) as api:
        read = survey.Survey(api, timeout_s=chosen.timeout, say=options.progress())
        await read.begin(_RIGHTS if is_writing else _RIGHTS[:1])
        forbidden = [one.why for one in read.unread if one.is_forbidden]
        if forbidden:
            options.tell(chosen.command, "; ".join(forbidden))
            return Exit.NO_RIGHTS
        found = await read.nodes()
        if found is None:
            options.tell(chosen.command, "; ".join(one.why for one in read.unread))
            is_forbidden = any(one.is_forbidden for one in read.unread)
            return Exit.NO_RIGHTS if is_forbidden else Exit.UNREACHABLE
        unknown = sorted(set(chosen.node or ()) - {node.name for node in found})
        if unknown:
            return options.mistake(chosen.command, f"no such node: {', '.join(unknown)}")
        rows, objection = await _planned(chosen, aliases, read, found)
        options.progress()("")
        sys.stdout.write(tables.written(rows))
        for one in read.unread:
            options.tell(chosen.command, f"not seen: {one.why}")
        if is_writing and any(not one.is_forbidden for one in read.unread):
            options.tell(
                chosen.command, "nothing is written: who knows best may not have been heard"
            )
            return Exit.UNREACHABLE
        if objection is not None:
            options.tell(chosen.command, f"nothing is written: {objection}; --partial")
            return Exit.PROBLEMS
        return await _carry_out(chosen, api, rows, is_writing=is_writing)


async def _planned(
    chosen: argparse.Namespace,
    aliases: dict[str, str],
    read: survey.Survey,
    found: Sequence[facts.Node],
) -> tuple[list[Row], str | None]:
    slices = await read.slices()
    agents, simulated = await read.reports(chosen.muster_namespace)
    is_unlabelling = chosen.command == "unlabel-gpus"
    views = sources.Views(
        agents,
        survey.of_slices(slices),
        aliases,
        may_use_instance_type=not is_unlabelling and chosen.from_instance_type,
    )
    fleet = states.fleet(found, views)
    if is_unlabelling:
        return plan.removals(fleet, only=chosen.node or ()), None
    allowed = plan.Allowed(
        unknown=chosen.allow_unknown,
        ambiguous=chosen.force_ambiguous,
        instance_type=chosen.from_instance_type,
        overwrite=chosen.overwrite,
        partial=chosen.partial,
        simulated=chosen.simulated,
    )
    rows = plan.rows(fleet, allowed, simulated=simulated, only=chosen.node or ())
    covering = states.covering(fleet)
    return rows, plan.objection(rows, allowed, covering=covering)


async def _carry_out(
    chosen: argparse.Namespace, api: kube.Api, rows: Sequence[Row], *, is_writing: bool
) -> int:
    work = [row for row in rows if row.step in {Step.WRITE, Step.REMOVE}]
    refused = [row for row in rows if row.step is Step.REFUSE]
    if not work:
        return Exit.PROBLEMS if refused else Exit.FINE
    if not is_writing:
        options.tell(chosen.command, f"{len(work)} nodes would be written; --apply does it")
        return Exit.FINE
    if not chosen.yes and not await _agreed(chosen.command, len(work)):
        return Exit.USAGE if not sys.stdin.isatty() else Exit.PROBLEMS
    door = nodes.Nodes(api, pace.Pace(chosen.rate), timeout_s=_ONE_TIMEOUT_S)
    failures = await _written(chosen, door, work)
    done = len(work) - len(failures)
    for node, failure in failures[:_FAILURES_SHOWN_MAX]:
        what = "gone meanwhile" if failure.is_gone else failure.text
        options.tell(chosen.command, f"{node}: {what}")
    if len(failures) > _FAILURES_SHOWN_MAX:
        options.tell(chosen.command, f"and {len(failures) - _FAILURES_SHOWN_MAX} more")
    sys.stdout.write(f"{done} of {len(work)} nodes written and read back\n")
    broken = [failure for _, failure in failures if not failure.is_gone]
    return Exit.PROBLEMS if broken or refused else Exit.FINE


async def _agreed(command: str, count: int) -> bool:
    """Ask a person; nobody is asked where there is no terminal."""
    if not sys.stdin.isatty():
        options.tell(command, f"{count} nodes: this is no terminal; say --yes")
        return False
    sys.stderr.write(f"Write {count} nodes? [y/N] ")
    sys.stderr.flush()
    answer = await asyncio.to_thread(sys.stdin.readline)
    return answer.strip().lower() in {"y", "yes"}


async def _written(
    chosen: argparse.Namespace, door: nodes.Nodes, work: Sequence[Row]
) -> list[tuple[str, nodes.Failure]]:
    """Write every node, several at a time and no faster than allowed; return what failed."""
    queue = list(reversed(work))
    failures: list[tuple[str, nodes.Failure]] = []
    say = options.progress()
    actor = f"{user.name()} with muster {chosen.command}"

    async def write() -> None:
        while queue:
            row = queue.pop()
            done = await _one(chosen, door, row, actor)
            if isinstance(done, nodes.Failure):
                failures.append((row.node, done))
            say(f"{len(work) - len(queue)} of {len(work)} nodes")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(_WRITERS, len(work))):
            tasks.create_task(write())
    say("")
    return sorted(failures, key=lambda failed: failed[0])


async def _one(
    chosen: argparse.Namespace, door: nodes.Nodes, row: Row, actor: str
) -> facts.Node | nodes.Failure:
    if row.step is Step.REMOVE:
        return await door.unlabel(row.standing.node)
    assert row.new is not None, "what is written has a value"
    at = datetime.now(UTC).isoformat(timespec="seconds")
    written = states.provenance(
        row.standing, row.new, actor=actor, version=muster.__version__, at=at
    )
    force = chosen.overwrite and bool(row.standing.others)
    return await door.label(
        row.standing.node,
        {schemes.SKYPILOT: row.new},
        provenance=msgspec.json.encode(written).decode(),
        force=force,
    )
