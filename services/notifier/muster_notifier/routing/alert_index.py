"""Pure: the alert index: which groups an alert belongs to, and which it has left.

The newest event about a fingerprint counts. An alert whose labels change leaves the groups that it
no longer belongs to: there it is resolved, as it last was. A resolved alert is resolved in every
group that it was in, also where it would not be routed any more. The receivers that owners of its
pods named stay until the owners are looked up again.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import codec, vocabulary
from muster_notifier.routing import groups, inputs, routes

_KNOWN_MAX: Final = 100_000
_WORDS_MAX: Final = 10_000

Places = Mapping[groups.Key, routes.Route]
Owners = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Filed:
    """An alert for one group, and the labels that name this."""

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


class AlertIndex:
    """What is known of every alert; see the module."""

    def __init__(
        self, root: routes.Route, owners: routes.Route | None, apart: Collection[str]
    ) -> None:
        """`owners` groups what goes to owners of workloads; they may name its receivers.

        Those in `apart` take each alert by itself, however a route groups.
        """
        self._root = root
        self._owners = owners
        self._apart = frozenset(apart)
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._words: dict[str, str] = {}
        self._place_sets: dict[tuple[groups.Key, ...], Places] = {}
        self._by_key = {route.key: route for route in root.walk()}
        if owners is not None:
            self._by_key[owners.key] = owners

    def take(self, heard: codec.CloudEvent | inputs.Owned) -> list[Filed] | None:
        """Return the groups that an alert concerns; None if something newer is known."""
        event = heard.event if isinstance(heard, inputs.Owned) else heard
        alert = event.data
        assert isinstance(alert, vocabulary.AlertChanged), f"{event.type} is no alert"
        known = self._known.get(alert.fingerprint)
        if known is not None and event.precedes(known.event):
            return None
        owners = known.owners if known is not None else {}
        if isinstance(heard, inputs.Owned):
            owners = heard.owners
        found = routes.labels_of(alert)
        places = self._places(found, owners)
        before = known.places if known is not None else {}
        if alert.state is vocabulary.AlertState.RESOLVED:
            places = {**before, **places}
        alert = self._slim(alert)
        self._keep(event, alert, places, owners)
        filed = [self._filed(key, route, alert, found, owners) for key, route in places.items()]
        left = [key for key in before if key not in places]
        if known is not None and left:
            ended = msgspec.structs.replace(
                known.alert, state=vocabulary.AlertState.RESOLVED, ends_at=event.time
            )
            was = routes.labels_of(known.alert)
            filed += [self._filed(key, before[key], ended, was, known.owners) for key in left]
        return filed

    def firing(self, fingerprints: Iterable[str]) -> frozenset[str]:
        """Return those alerts that fire, of these."""
        known = ((name, self._known.get(name)) for name in fingerprints)
        fires = vocabulary.AlertState.FIRING
        return frozenset(name for name, one in known if one and one.alert.state is fires)

    def route_of(self, group: str) -> routes.Route | None:
        """Return the route that a group's name speaks of, if there still is one."""
        found = [key for key in self._by_key if group.startswith(f"{key}:{{")]
        return self._by_key[max(found, key=len)] if found else None

    def _filed(
        self,
        key: groups.Key,
        route: routes.Route,
        alert: vocabulary.AlertChanged,
        found: Mapping[str, str],
        owners: Owners,
    ) -> Filed:
        """Return the alert as this receiver shall see it: an owner sees no pods of others."""
        receiver = key[0]
        if route is self._owners and receiver in owners:
            own = owners[receiver]
            alert = msgspec.structs.replace(alert, pods=own, pods_total=len(own))
        return Filed(key, route, alert, self._chosen(receiver, route, found))

    def _places(self, found: Mapping[str, str], owners: Owners) -> Places:
        places: dict[groups.Key, routes.Route] = {}
        for route in self._root.find(found):
            for receiver in route.receivers:
                places.setdefault(self._key(receiver, route, found), route)
        if self._owners is not None:
            for receiver in sorted(set(owners) & set(self._owners.receivers)):
                places.setdefault(self._key(receiver, self._owners, found), self._owners)
        return places

    def _key(self, receiver: str, route: routes.Route, found: Mapping[str, str]) -> groups.Key:
        return receiver, f"{route.key}:{routes.format_labels(self._chosen(receiver, route, found))}"

    def _chosen(
        self, receiver: str, route: routes.Route, found: Mapping[str, str]
    ) -> Mapping[str, str]:
        return routes.select_labels(
            found, (routes.ALL_LABELS,) if receiver in self._apart else route.group_by
        )

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
