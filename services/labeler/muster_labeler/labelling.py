"""Adapter: people: `muster label-gpus` and `muster unlabel-gpus`: show, ask, write, read back."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

import msgspec

import muster
from muster import user
from muster.kubernetes import api
from muster_labeler import (
    access,
    asking,
    facts,
    features,
    naming,
    nodes,
    objects,
    options,
    pace,
    plan,
    reports,
    schemes,
    sources,
    states,
    survey,
    tables,
    world,
)
from muster_labeler.findings import Exit
from muster_labeler.plan import Row, Step

_WRITERS: Final = 32
_RATE_MAX: Final = 1000.0
_ONE_TIMEOUT_S: Final = 10.0
_RIGHTS: Final = (
    access.Right("list", "nodes"),
    access.Right("get", "nodes"),
    access.Right("patch", "nodes"),
)
_FAILURES_SHOWN_MAX: Final = 20


def run(chosen: argparse.Namespace) -> int:
    """Label or unlabel what was chosen; return the exit code."""
    if not 0 < chosen.rate <= _RATE_MAX:
        return options.mistake(chosen.command, f"--rate: more than 0 and at most {_RATE_MAX:g}")
    try:
        known = naming.aliases(chosen.aliases)
        return asyncio.run(_run(chosen, known))
    except (naming.BadAliases, options.Mistake) as error:
        return options.mistake(chosen.command, str(error))
    except (api.NoCluster, survey.Unreachable) as error:
        options.tell(chosen.command, str(error))
        return Exit.UNREACHABLE


async def _run(chosen: argparse.Namespace, aliases: dict[str, str]) -> int:
    is_writing = chosen.command == "unlabel-gpus" and not chosen.dry_run
    is_writing = is_writing or (chosen.command == "label-gpus" and chosen.apply)
    if chosen.command == "label-gpus" and chosen.features and (is_writing or not chosen.node):
        raise options.Mistake("--features: name one --node, and do not --apply")
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
            raise options.Mistake(f"no such node: {', '.join(unknown)}")
        if chosen.command == "unlabel-gpus":
            rows, objection = plan.removals(found, only=chosen.node or ()), None
        else:
            rows, objection, views = await _planned(chosen, aliases, read, found)
        options.progress()("")
        if chosen.command == "label-gpus" and chosen.features:
            objection = _unheard(chosen, read.unread) or objection
            return features.write(chosen, rows, views, objection=objection)
        sys.stdout.write(tables.written(rows))
        if objection is None and is_writing:
            objection = _unheard(chosen, read.unread)
        elif read.unread:
            _unheard(chosen, read.unread)
        if objection is not None:
            options.tell(chosen.command, f"nothing is written: {objection}")
            is_unread = any(not one.is_forbidden for one in read.unread)
            return Exit.UNREACHABLE if is_unread else Exit.PROBLEMS
        judged = [node.name for node in found if node.has_condition]
        return await _carry_out(chosen, api, rows, is_writing=is_writing, judged=judged)


async def _planned(
    chosen: argparse.Namespace,
    aliases: dict[str, str],
    read: survey.Survey,
    found: Sequence[facts.Node],
) -> tuple[list[Row], str | None, sources.Views]:
    slices = await read.slices()
    agents, simulated = await read.reports(chosen.muster_namespace)
    views = sources.Views(
        agents,
        survey.of_slices(slices),
        aliases,
        may_use_instance_type=chosen.from_instance_type,
    )
    fleet = states.fleet(found, views)
    allowed = plan.Allowed(
        unknown=chosen.allow_unknown,
        ambiguous=chosen.force_ambiguous,
        instance_type=chosen.from_instance_type,
        overwrite=chosen.overwrite,
        partial=chosen.partial,
        simulated=chosen.simulated,
    )
    # every node writes its own file of features: together they are all
    only = () if chosen.features else chosen.node or ()
    rows = plan.rows(fleet, allowed, simulated=simulated, only=only)
    covering = states.covering(fleet)
    objection = plan.objection(rows, allowed, covering=covering)
    return rows, f"{objection}; --partial" if objection else None, views


def _unheard(chosen: argparse.Namespace, unread: Sequence[world.Unread]) -> str | None:
    """Tell what could not be seen; return why nothing may be written then."""
    for one in unread:
        options.tell(chosen.command, f"not seen: {one.why}")
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
    hidden = plan.left_out(rows) if is_unlabelling else []
    if work and hidden and len(hidden) < len(rows):
        options.tell(chosen.command, f"without the label SkyPilot does not see {_few(hidden)}")
    is_emptying = is_unlabelling and chosen.objects
    if not work and not is_emptying:
        return Exit.PROBLEMS if refused else Exit.FINE
    if not is_writing:
        how = "without --dry-run it is done" if is_unlabelling else "--apply does it"
        options.tell(chosen.command, f"{len(work)} nodes would be written; {how}")
        return Exit.FINE
    if not chosen.yes and not await _agreed(chosen, api, len(work)):
        return Exit.USAGE if not sys.stdin.isatty() else Exit.PROBLEMS
    turns = pace.Pace(chosen.rate)
    door = nodes.Nodes(api, turns, timeout_s=_ONE_TIMEOUT_S)
    failures = await _written(chosen, door, work)
    done = len(work) - len(failures)
    for node, failure in failures[:_FAILURES_SHOWN_MAX]:
        what = "gone meanwhile" if failure.is_gone else failure.text
        options.tell(chosen.command, f"{node}: {what}")
    if len(failures) > _FAILURES_SHOWN_MAX:
        options.tell(chosen.command, f"and {len(failures) - _FAILURES_SHOWN_MAX} more")
    sys.stdout.write(f"{done} of {len(work)} nodes written and read back\n")
    broken = [failure.text for _, failure in failures if not failure.is_gone]
    if is_emptying:
        left = await objects.remove(
            api,
            turns,
            nodes=judged,
            namespace=chosen.muster_namespace,
            timeout_s=_ONE_TIMEOUT_S,
        )
        for text in left:
            options.tell(chosen.command, text)
        broken.extend(left)
    return Exit.PROBLEMS if broken or refused else Exit.FINE


async def _agreed(chosen: argparse.Namespace, api: api.Api, count: int) -> bool:
    """Ask a person; nobody is asked where there is no terminal."""
    if not sys.stdin.isatty():
        options.tell(chosen.command, f"{count} nodes: this is no terminal; say --yes")
        return False
    where = f"{api.server} (context {api.context})" if api.context else api.server
    do = "Remove our labels from" if chosen.command == "unlabel-gpus" else "Label"
    return await asking.agreed(reports.plain(f"{do} {count} nodes of {where}?"))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")  # noqa: PLR2004


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
