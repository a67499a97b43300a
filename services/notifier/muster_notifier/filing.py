"""Pure. Which groups an alert belongs to, and which it has left.

The newest fact about a fingerprint holds. An alert that changes its labels leaves the groups that
it no longer belongs to: there it is over, as it was last known. One that is over ends wherever it
was known, also where it would not go any more. Whom the owners of its pods named is known until
they are asked anew.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster_notifier import group as groups
from muster_notifier import labels, routes, signals

_KNOWN_MAX: Final = 100_000
_WORDS_MAX: Final = 10_000

Places = Mapping[groups.Key, routes.Route]
Owners = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Filed:
    """An alert for one group, and all of its labels."""

    key: groups.Key
    route: routes.Route
    alert: vocabulary.AlertChanged
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Known:
    event: codec.CloudEvent
    alert: vocabulary.AlertChanged
    places: Places
    owners: Owners


class Files:
    """What is known of every alert; see the module."""

    def __init__(self, root: routes.Route, owners: routes.Route | None) -> None:
        """`owners` groups what goes to owners of workloads; they may name its receivers."""
        self._root = root
        self._owners = owners
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._words: dict[str, str] = {}
        self._place_sets: dict[tuple[groups.Key, ...], Places] = {}
        self._by_key = {route.key: route for route in root.walk()}
        if owners is not None:
            self._by_key[owners.key] = owners

    def take(self, heard: codec.CloudEvent | signals.Owned) -> list[Filed] | None:
        """Return the groups that an alert concerns; None if something newer is known."""
        event = heard.event if isinstance(heard, signals.Owned) else heard
        alert = event.data
        assert isinstance(alert, vocabulary.AlertChanged), f"{event.type} is no alert"
        known = self._known.get(alert.fingerprint)
        if known is not None and event.precedes(known.event):
            return None
        owners = known.owners if known is not None else {}
        if isinstance(heard, signals.Owned):
            owners = heard.owners
        found = labels.of(alert)
        places = self._places(found, owners)
        before = known.places if known is not None else {}
        if alert.state is vocabulary.AlertState.RESOLVED:
            places = {**before, **places}
        alert = self._slim(alert)
        self._keep(event, alert, places, owners)
        filed = [
            Filed(key, route, self._as_told_to(key, route, alert, owners), found)
            for key, route in places.items()
        ]
        left = [key for key in before if key not in places]
        if known is not None and left:
            ended = msgspec.structs.replace(
                known.alert, state=vocabulary.AlertState.RESOLVED, ends_at=event.time
            )
            former = labels.of(known.alert)
            filed += [
                Filed(
                    key,
                    before[key],
                    self._as_told_to(key, before[key], ended, known.owners),
                    former,
                )
                for key in left
            ]
        return filed

    def route_of(self, group: str) -> routes.Route | None:
        """Return the route that a group's name speaks of, if there still is one."""
        found = [key for key in self._by_key if group.startswith(f"{key}:{{")]
        return self._by_key[max(found, key=len)] if found else None

    def _as_told_to(
        self,
        key: groups.Key,
        route: routes.Route,
        alert: vocabulary.AlertChanged,
        owners: Owners,
    ) -> vocabulary.AlertChanged:
        """Return the alert as this receiver shall see it: an owner sees no pods of others."""
        if route is not self._owners or key[0] not in owners:
            return alert
        return msgspec.structs.replace(alert, pods=owners[key[0]])

    def _places(self, found: Mapping[str, str], owners: Owners) -> Places:
        places: dict[groups.Key, routes.Route] = {}
        for route in self._root.find(found):
            name = _name_group(route, found)
            for receiver in route.receivers:
                places.setdefault((receiver, name), route)
        if self._owners is not None:
            name = _name_group(self._owners, found)
            for receiver in sorted(set(owners) & set(self._owners.receivers)):
                places.setdefault((receiver, name), self._owners)
        return places

    def _keep(
        self,
        event: codec.CloudEvent,
        alert: vocabulary.AlertChanged,
        places: Places,
        owners: Owners,
    ) -> None:
        kept = msgspec.structs.replace(
            event,
            id="",
            source=self._word(event.source),
            type=alert.TYPE,
            time=alert.at,
            instance=self._word(event.instance),
            boot="",
            data=alert,
        )
        if len(self._place_sets) > _WORDS_MAX:
            self._place_sets.clear()
        shared = self._place_sets.setdefault(tuple(places), places)
        self._known[alert.fingerprint] = _Known(kept, alert, shared, owners)
        self._known.move_to_end(alert.fingerprint)
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)

    def _slim(self, alert: vocabulary.AlertChanged) -> vocabulary.AlertChanged:
        """Return an alert that shares its words: a storm is thousands that say nearly the same."""
        return msgspec.structs.replace(
            alert,
            plugin=self._word(alert.plugin),
            resource=self._word(alert.resource),
            advice=self._word(alert.advice),
            runbook=self._word(alert.runbook),
            evidence=tuple(
                vocabulary.Evidence(source=self._word(one.source), observed=one.observed)
                for one in alert.evidence
            ),
        )

    def _word(self, text: str) -> str:
        if len(self._words) > _WORDS_MAX:
            self._words.clear()
        return self._words.setdefault(text, text)


def _name_group(route: routes.Route, found: Mapping[str, str]) -> str:
    return f"{route.key}:{labels.written(labels.chosen(found, route.group_by))}"
