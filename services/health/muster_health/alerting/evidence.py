"""Pure: Observations in words a person understands; each names who saw it."""

import functools
from collections.abc import Iterable
from typing import Final

from muster import vocabulary
from muster_health.model import facts

_TEXT_MAX: Final = 500
_PODS_SHOWN: Final = 3


def seen(source: str, text: str) -> vocabulary.Evidence:
    """Return one observation; a long text is cut, because a plugin may have written it."""
    cut = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    return vocabulary.Evidence(source=source, observed=cut)


def silent(silent_s: float, interval_s: float, *, ever_heard: bool) -> vocabulary.Evidence:
    """Say that no heartbeat came."""
    waited = f"{silent_s:.1f} s, {silent_s / interval_s:.1f} intervals of {interval_s:g} s"
    return seen("heartbeat", f"none for {waited}" if ever_heard else f"none yet; waited {waited}")


def nobody_listens() -> vocabulary.Evidence:
    """Say that the server knew at once of no receiver for a probe."""
    return seen("probe", "nobody is subscribed to the plugin's subject")


def no_answer(timeout_s: float) -> vocabulary.Evidence:
    """Say that a probe was delivered, and not answered."""
    return seen("probe", f"the plugin is subscribed but did not answer within {timeout_s:g} s")


def cluster(known: facts.Facts | None, resources: Iterable[str]) -> list[vocabulary.Evidence]:
    """Say what Kubernetes knows; what it does not know is said as well."""
    if known is None:
        return [undecided("no answer from the Kubernetes API")]
    told: list[str] = []
    if known.exists is False:
        told.append("the node is not in the cluster")
    if known.lease_age_s is not None:
        told.append(f"node lease renewed {known.lease_age_s:.0f} s ago")
    if known.ready is not None:
        told.append("node Ready" if known.ready else "node not Ready")
    told += [f"node is {sign.replace('_', ' ')}" for sign in known.planned]
    found = [seen("kubernetes", "; ".join(told))] if told else []
    found += [seen("kubernetes", _pod(pod)) for pod in (known.pods or ())[:_PODS_SHOWN]]
    if known.pods == ():
        found.append(seen("kubernetes", "the plugin has no pod on the node"))
    offered = known.offers or {}
    shown = [
        f"{name} allocatable {offered[name].allocatable} of {offered[name].capacity}"
        for name in resources
        if name in offered
    ]
    if shown:
        found.append(seen("kubernetes", "; ".join(shown)))
    if known.problem:
        found.append(undecided(f"could not be read: {known.problem}"))
    return found


def undecided(text: str) -> vocabulary.Evidence:
    """Say what could not be told apart, and for want of what."""
    return seen("health", text)


def fell(falls: int, window_s: float) -> vocabulary.Evidence:
    """Say how often something failed."""
    return seen("health", f"failed {falls} times within {window_s / 60:g} min")


@functools.cache
def alive() -> vocabulary.Evidence:
    """Say that a first sign of life shows nothing wrong."""
    return seen("heartbeat", "alive, reports no problem")


def recovered(good_beats: int) -> vocabulary.Evidence:
    """Say that signs of life came back and stayed."""
    heartbeats = "heartbeat" if good_beats == 1 else "heartbeats"
    return seen("heartbeat", f"{good_beats} good {heartbeats} since it came back")


def goodbye(reason: vocabulary.StopReason, return_s: float, *, said: bool) -> vocabulary.Evidence:
    """Say that the plugin announced its end."""
    source = "" if said else " (by detection.maintenance_s)"
    return seen(
        "plugin", f"announced that it stops ({reason}); expected back within {return_s:g} s{source}"
    )


def overdue(return_s: float, since: str) -> vocabulary.Evidence:
    """Say that a planned end lasts too long; `since` is what it began with."""
    return seen("clock", f"not back {return_s:g} s after {since}")


def _pod(pod: facts.Pod) -> str:
    told = [f"pod {pod.name} {pod.phase}", "Ready" if pod.ready else "not Ready"]
    if pod.waiting:
        told.append(pod.waiting)
    if pod.restarts:
        told.append(f"{pod.restarts} restarts")
    if pod.deleting:
        told.append("being deleted")
    if pod.is_outdated:
        told.append("to be replaced by a rollout")
    return ", ".join(told)
