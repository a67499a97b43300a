"""Pure: formats observations as evidence, each with its source."""

import functools
from collections.abc import Iterable
from typing import Final

from muster import vocabulary, wording
from muster_health.model import signals

_TEXT_MAX: Final = 500
_PODS_SHOWN: Final = 3


def of(source: str, text: str) -> vocabulary.Evidence:
    """Return one observation; a long text is truncated, because a plugin may have written it."""
    cut = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    return vocabulary.Evidence(source=source, observed=cut)


def silent(silent_s: float, interval_s: float, *, ever_heard: bool) -> vocabulary.Evidence:
    """Return the evidence that no heartbeat has arrived for `silent_s` seconds."""
    waited = f"{silent_s:.1f} s, {silent_s / interval_s:.1f} intervals of {interval_s:g} s"
    return of("heartbeat", f"none for {waited}" if ever_heard else f"none yet; waited {waited}")


def not_subscribed() -> vocabulary.Evidence:
    """Return the evidence that a probe was not delivered, because there is no subscriber."""
    return of("probe", "no process is subscribed to the plugin's subject in NATS")


def no_answer(timeout_s: float) -> vocabulary.Evidence:
    """Return the evidence that a probe was delivered but not answered."""
    return of("probe", f"the plugin is subscribed but did not answer within {timeout_s:g} s")


def cluster(answer: signals.Facts | None, resources: Iterable[str]) -> list[vocabulary.Evidence]:
    """Return the answer from Kubernetes as evidence, including any read errors."""
    if answer is None:
        return [undecided("no answer from the Kubernetes API")]
    observations = []
    if node := _node(answer):
        observations.append(of("kubernetes", node))
    observations += [of("kubernetes", _pod(pod)) for pod in (answer.pods or ())[:_PODS_SHOWN]]
    if answer.pods == ():
        observations.append(of("kubernetes", "the plugin has no pod on the node"))
    offers = answer.offers or {}
    allocatable = [
        f"{name} allocatable {offers[name].allocatable} of {offers[name].capacity}"
        for name in resources
        if name in offers
    ]
    if allocatable:
        observations.append(of("kubernetes", "; ".join(allocatable)))
    if answer.problem:
        observations.append(undecided(f"could not be read: {answer.problem}"))
    return observations


def kubelet(lease_age_s: float, *, is_ready: bool | None) -> list[vocabulary.Evidence]:
    """Return the age of the node's lease, and whether the node is Ready, as evidence."""
    renewed = f"the kubelet renewed the node's lease {lease_age_s:.0f} s ago; it does so every 10 s"
    if is_ready is None:
        return [of("kubernetes", renewed)]
    return [of("kubernetes", renewed), of("kubernetes", _ready(is_ready=is_ready))]


def undecided(text: str) -> vocabulary.Evidence:
    """Return a remark of health, such as why a decision was not possible, as evidence."""
    return of("health", text)


def failures(count: int, window_s: float) -> vocabulary.Evidence:
    """Return the number of the plugin's failures as evidence."""
    return of("health", f"failed {count} times within {window_s / 60:g} min")


@functools.cache
def alive() -> vocabulary.Evidence:
    """Return the evidence that a first heartbeat reports no problem."""
    return of("heartbeat", "alive, reports no problem")


def recovered(good_heartbeats: int) -> vocabulary.Evidence:
    """Return the evidence that heartbeats are arriving again."""
    heartbeats = wording.counted(good_heartbeats, "good heartbeat")
    return of("heartbeat", f"{heartbeats} since it came back")


def stop_announced(
    reason: vocabulary.StopReason, return_s: float, *, is_own: bool
) -> vocabulary.Evidence:
    """Return the evidence of an announced stop; `is_own` means that the plugin gave `return_s`."""
    setting = "" if is_own else " (the setting detection.maintenance_s)"
    expected = f"expected back within {return_s:g} s{setting}"
    return of("plugin", f"announced a stop ({reason}); {expected}")


def overdue(return_s: float, since: str) -> vocabulary.Evidence:
    """Return the evidence that a planned stop takes too long; `since` is how it began."""
    return of("clock", f"not back {return_s:g} s after {since}")


def _node(answer: signals.Facts) -> str:
    parts = []
    if answer.exists is False:
        parts.append("the node is not in the cluster")
    if answer.lease_age_s is not None:
        parts.append(f"node lease renewed {answer.lease_age_s:.0f} s ago")
    if answer.ready is not None:
        parts.append(_ready(is_ready=answer.ready))
    parts += [f"node is {sign.replace('_', ' ')}" for sign in answer.planned]
    return "; ".join(parts)


def _ready(*, is_ready: bool) -> str:
    return "node Ready" if is_ready else "node not Ready"


def _pod(pod: signals.Pod) -> str:
    parts = [f"pod {pod.name} {pod.phase}", "Ready" if pod.ready else "not Ready"]
    if pod.waiting:
        parts.append(pod.waiting)
    if pod.restarts:
        parts.append(wording.counted(pod.restarts, "restart"))
    if pod.last_exit:
        parts.append(f"last {pod.last_exit}")
    if pod.deleting:
        parts.append("being deleted")
    if pod.is_outdated:
        parts.append("to be replaced by a rollout")
    return ", ".join(parts)
