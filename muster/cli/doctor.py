"""Adapter for the terminal: `muster doctor` reports on one screen whether muster itself works."""

import asyncio
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import cyclopts
import msgspec

from muster import commands, wording
from muster.cli import (
    doctor_bundle,
    doctor_findings,
    doctor_observer,
    events,
    health,
    output,
    reach,
    texts,
)
from muster.cli.doctor_facts import Commands, Finding, Level
from muster.service import sections

app = cyclopts.App(name="doctor")

_LONGEST: Final = timedelta(days=1)
_REPEATED_MAX: Final = 2
"""If more checks than this are skipped for the same reason, they share one line."""
_CLOSINGS: Final = {
    0: "muster works",
    1: "muster has problems",
    2: "not everything could be checked",
}


@app.default
def doctor(
    *,
    context: str | None = None,
    namespace: str = reach.NAMESPACE,
    url: events.Url = None,
    health: health.Health = None,
    within: str = "30s",
    bundle: Path | None = None,
    force: output.Flag = False,
    json: output.Json = False,
) -> int:
    """Check whether muster itself works: pods, bus, streams, leaders, versions, receivers.

    The exit code is 0 if muster works, 1 if something fails, and 2 if not everything could be
    checked.

    Parameters
    ----------
    context
        The kubeconfig's context of a cluster with muster; without it, the pods are not checked.
    namespace
        The namespace of muster in that cluster.
    within
        The time limit: `30s`, `2m`; a bundle may take the same time again.
    bundle
        Write an archive for a bug report to this file, such as muster.tar.gz: the findings, pods,
        the ends of their logs, streams, settings and versions, all without secrets.
    force
        Overwrite the file of `--bundle`.

    """
    if context and (problem := commands.missing("labeler")):
        return output.fail("doctor", problem)
    if context:
        # like other commands with a context, this ignores the environment variables
        url = None if url == os.environ.get("NATS_URL") else url
        health = None if health == os.environ.get("MUSTER_HEALTH_URL") else health
    try:
        msgspec.convert({"url": url or "nats://127.0.0.1"}, sections.Bus)
    except msgspec.ValidationError:
        return output.fail("doctor", "--url: not a NATS address such as nats://127.0.0.1:4222")
    try:
        lasts = texts.duration(within, longest=_LONGEST)
    except ValueError as error:
        return output.fail("doctor", f"--within: {error}")
    if not (context or url or health):
        _name_chosen()
    target = doctor_observer.Target(
        context=context,
        namespace=namespace,
        url=url,
        health=health,
        within_s=lasts.total_seconds(),
    )
    try:
        if bundle:
            doctor_bundle.check(bundle, force=force)
        code, findings, content = asyncio.run(_examine(target, has_bundle=bundle is not None))
        if json:
            output.print_json(_summary(findings, code))
        else:
            output.show(*lines(findings, code))
        if bundle:
            doctor_bundle.write(bundle, content, force=force)
            output.warn("doctor", f"wrote {bundle}; read it before you share it")
    except doctor_bundle.Refused as error:
        return output.fail("doctor", f"--bundle: {error}")
    return code


def _name_chosen() -> None:
    """If this user runs several stacks of `muster up`, print which of them is checked."""
    for _, nats_url in health.running_here()[:1]:
        events.name_chosen("doctor", nats_url)


async def _examine(
    target: doctor_observer.Target, *, has_bundle: bool
) -> tuple[int, list[Finding], bytes]:
    """Return the exit code, the findings, and the bundle (empty without `has_bundle`)."""
    with events.outages_hidden(everything=True) as reasons:
        async with doctor_observer.opened(target, output.progress, reasons) as observer:
            observed = await observer.observe()
            findings = doctor_findings.evaluate(observed, _commands(target), observer.now())
            code = doctor_findings.exit_code(observed, findings)
            archive = doctor_bundle.Bundle(observer.secrets)
            if has_bundle:
                text = "".join(f"{line}\n" for line in lines(findings, code))
                archive.add_text("report.txt", text)
                archive.add_tree("report.json", _summary(findings, code))
                await archive.collect(observer, observed)
    output.progress("")
    return code, findings, archive.archive() if has_bundle else b""


def _summary(findings: Sequence[Finding], code: int) -> dict[str, object]:
    return {"exit_code": code, "findings": findings}


def _commands(target: doctor_observer.Target) -> Commands:
    if target.context is None:
        return Commands()
    namespace, context = shlex.quote(target.namespace), shlex.quote(target.context)
    named = "" if namespace == reach.NAMESPACE else f" --namespace {namespace}"
    return Commands(
        muster=f"muster --context {context}{named}",
        kubectl=f"kubectl --context {context} -n {namespace}",
    )


def lines(findings: Sequence[Finding], code: int) -> list[str]:
    """Return the findings and a conclusion as lines for people."""
    width = max(len(finding.check) for finding in findings)
    unseen = Counter(each.text for each in findings if each.level is Level.NOT_CHECKED)
    repeated = {text for text, count in unseen.items() if count > _REPEATED_MAX}
    text = []
    for finding in findings:
        if finding.level is Level.NOT_CHECKED and finding.text in repeated:
            continue
        is_seen = finding.level is not Level.NOT_CHECKED
        level, what = (finding.level, "") if is_seen else ("?", "not checked: ")
        text.append(f"{level:4}  {finding.check:{width}}  {what}{finding.text}")
        if finding.next_step:
            text.append(f"{'':4}  {'':{width}}  -> {finding.next_step}")
    for why in sorted(repeated):
        checks = ", ".join(finding.check for finding in findings if finding.text == why)
        text.append(f"{'?':4}  not checked: {checks}: {why}")
    warned = [finding.check for finding in findings if finding.level is Level.WARN]
    closing = f"muster works, but see {wording.listed(warned)}" if warned and not code else ""
    return [*text, "", closing or _CLOSINGS[code]]
