"""Adapter for NATS and the Kubernetes API: the program that `helm test` runs.

It waits for a pod that requests a device, and publishes an alert, marked as a test, which the
notifier delivers like any other. It has the rights of health, because only health may publish
alerts.
"""

import asyncio
import contextlib
import os
import secrets
import sys
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

import muster
from muster import client, vocabulary
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import installation
from muster.kubernetes.installation import Allocation
from muster.nats import bus
from muster.service import entry

_NAME: Final = "helm-test"
_REQUEST_S: Final = 10.0
_PAUSE_S: Final = 1.0
_AGAIN_S: Final = 30.0
"""How long a refused or unschedulable pod does not end the test: plugins may register late."""
_DEVICE_S: Final = 180.0
_ALERT_S: Final = 180.0
_BEFORE: Final = timedelta(minutes=1)
"""How far back events are read, because the clocks of nodes may differ."""


class Failed(Exception):
    """A test failed; the message gives the reason."""


def main() -> int:
    """Test the installation that this pod is in; return the exit code."""
    url, namespace = os.environ["NATS_URL"], os.environ["NAMESPACE"]
    return asyncio.run(_run(url, namespace, sys.argv[1:]))


async def _run(url: str, namespace: str, resources: list[str]) -> int:
    tests = [_alert(url), *(_device(namespace, resource) for resource in resources)]
    if not resources:
        entry.show("skipped: muster serves no devices here")
    failures = 0
    for ended in asyncio.as_completed(tests):
        try:
            entry.show(await ended)
        except Failed as error:
            entry.show(f"failed: {error}")
            failures += 1
    return min(1, failures)


async def _device(namespace: str, resource: str) -> str:
    """Wait until the pod that requests a device runs or is unschedulable; return the result.

    Raises Failed.
    """
    label = "app.kubernetes.io/name=muster-test-device"
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        api = await kubernetes_api.find(kubeconfig=None, context=None)
    except kubernetes_api.NoCluster as error:
        raise Failed(str(error)) from None
    async with api:
        while True:
            pods = await _pods(api, namespace, label)
            state, text = installation.allocation(pods)
            waited_s = clock() - began
            match state:
                case Allocation.GIVEN:
                    return f"passed: a pod got {resource}: {text}"
                case Allocation.REFUSED if waited_s > _AGAIN_S:
                    raise Failed(f"a pod did not get {resource}: {text}")
                case Allocation.UNSCHEDULABLE if waited_s > _AGAIN_S:
                    return f"skipped: no node has {resource} for a pod: {text}"
                case _ if waited_s > _DEVICE_S:
                    raise Failed(f"a pod has no {resource} after {_DEVICE_S:g} s: {text}")
            await asyncio.sleep(_PAUSE_S)


async def _pods(api: kubernetes_api.Api, namespace: str, label: str) -> list[installation.Pod]:
    path = f"/api/v1/namespaces/{namespace}/pods"
    try:
        return [
            msgspec.json.decode(item, type=installation.Pod)
            async for page in api.pages(path, query={"labelSelector": label}, timeout_s=_REQUEST_S)
            for item in page.items
        ]
    except kubernetes_api.Refused as error:
        raise Failed(str(error)) from None
    except msgspec.MsgspecError as error:
        raise Failed(f"the answer to get {path} is unreadable: {error}") from None


async def _alert(url: str) -> str:
    """Publish an alert, wait until it is delivered, and resolve it. Raises Failed."""
    try:
        async with asyncio.timeout(_ALERT_S):
            async with bus.Bus(url, producer=f"clients/{_NAME}", name=_NAME) as link:
                return await _delivered(link, url)
    except TimeoutError:
        raise Failed(
            f"no test alert was delivered within {_ALERT_S:g} s: does a receiver accept alerts "
            "with severity info, and are group_wait_s and group_interval_s shorter than this?"
        ) from None
    except ConnectionError as error:
        raise Failed(str(error)) from None


async def _delivered(link: bus.Bus, url: str) -> str:
    clock = asyncio.get_running_loop().time
    alert = _example(await _leading_term(url))
    await link.publish(alert)
    began = clock()
    try:
        outcome = await _outcome(url, alert.fingerprint)
    finally:
        now, over = datetime.now(UTC), vocabulary.AlertState.RESOLVED
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REQUEST_S):
                await link.publish(msgspec.structs.replace(alert, at=now, state=over, ends_at=now))
    if isinstance(outcome, vocabulary.NotificationFailed):
        raise Failed(f"{outcome.receiver} did not get the test alert: {outcome.error}")
    return f"passed: {outcome.receiver} got the test alert, {clock() - began:.0f} s after it fired"


async def _leading_term(url: str) -> int:
    """Return the term of the leading health service; the notifier drops alerts of other terms."""
    ticks = client.events("watchdog.ticked", since=_BEFORE, url=url)
    async with contextlib.aclosing(ticks) as events_:
        async for event in events_:
            if isinstance(event.data, vocabulary.WatchdogTicked):
                return event.data.leader
    raise Failed("no health service leads")


async def _outcome(url: str, fingerprint: str) -> vocabulary.NotificationEvent:
    """Return the first outcome of a notification about an alert."""
    outcomes = client.events("notification.*", since=_BEFORE, url=url)
    async with contextlib.aclosing(outcomes) as events_:
        async for event in events_:
            outcome = event.data
            if isinstance(outcome, vocabulary.NotificationEvent) and fingerprint in outcome.firing:
                return outcome
    raise Failed("the notifier published nothing")


def _example(leader: int) -> vocabulary.AlertChanged:
    now, fingerprint = datetime.now(UTC), secrets.token_hex(8)
    return vocabulary.AlertChanged(
        # its own group: an alert in the group of an earlier test would wait for group_interval_s
        node=f"{_NAME}-{fingerprint}",
        at=now,
        plugin=vocabulary.TEST_PLUGIN,
        kind=vocabulary.AlertKind.STUCK,
        severity=vocabulary.Severity.INFO,
        state=vocabulary.AlertState.FIRING,
        fingerprint=fingerprint,
        summary="this is a test message from helm test",
        starts_at=now,
        evidence=(vocabulary.Evidence(source="helm", observed="helm test was run"),),
        runbook=f"{muster.RUNBOOKS_URL}index.html",
        leader=leader,
    )


if __name__ == "__main__":
    sys.exit(main())
