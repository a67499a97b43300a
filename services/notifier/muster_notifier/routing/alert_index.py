"""Pure: tracks the groups to which each alert belongs, or belonged before its labels changed.

The newest event about a fingerprint counts. When the labels of an alert change, its last version is
resolved in the groups that it no longer belongs to. A resolved alert is resolved in all its groups,
including those of the previous event. The receivers that the owners of an alert's pods have named
are kept until the owners are looked up again.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from muster import codec, matching, vocabulary
from muster_notifier.routing import groups, routes

_ENTRIES_MAX: Final = 100_000
_STRINGS_MAX: Final = 10_000

Places = Mapping[groups.Key, routes.Route]
Owners = Mapping[str, tuple[str, ...]]

_NO_OWNERS: Final[Owners] = {}


@dataclass(frozen=True, slots=True)
class OwnedAlert:
    """An alert's event; `owners` are the pods whose owners named a receiver, by that receiver."""

    event: codec.CloudEvent
    owners: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Placement:
    """One alert in one group, with the labels that form the group's name."""

    key: groups.Key
    route: routes.Route
    alert: vocabulary.AlertChanged
    labels: Mapping[str, str]


class _Entry(msgspec.Struct, frozen=True, gc=False):
    event: codec.CloudEvent
    alert: vocabulary.AlertChanged
    places: Places
    owners: Owners


class AlertIndex:
    """Stores the latest event of every alert, and the groups that each alert belongs to."""

    def __init__(
        self, root: routes.Route, owners: routes.Route | None, ungrouped: Collection[str]
    ) -> None:
        """Create an empty index; `owners` is the route to the owners of workloads.

        Receivers in `ungrouped` get each alert separately, whatever the route's grouping.
        """
        self._root = root
        self._owners = owners
        self._ungrouped = frozenset(ungrouped)
        self._entries: dict[str, _Entry] = {}
        self._strings: dict[str, str] = {}
        self._place_sets: dict[tuple[groups.Key, ...], Places] = {}
        self._by_key = {route.key: route for route in root.walk()}
        if owners is not None:
            self._by_key[owners.key] = owners

    def update(self, received: codec.CloudEvent | OwnedAlert) -> list[Placement] | None:
        """Store an alert and return its place in each of its groups; None if the event is outdated.

        In groups to which the alert no longer belongs, its last version is returned as resolved.
        """
        event = received.event if isinstance(received, OwnedAlert) else received
        alert = event.data
        assert isinstance(alert, vocabulary.AlertChanged), f"{event.type} is not an alert"
        entry = self._entries.get(alert.fingerprint)
        if entry is not None and event.precedes(entry.event):
            return None
        owners = entry.owners if entry is not None else _NO_OWNERS
        if isinstance(received, OwnedAlert):
            owners = received.owners
        labels = matching.labels_of(alert)
        places = self._places(labels, owners)
        before = entry.places if entry is not None else {}
        if alert.state is vocabulary.AlertState.RESOLVED:
            places = {**before, **places}
        alert = self._with_shared_strings(alert)
        self._store(event, alert, places, owners)
        placements = [
            self._placement(key, route, alert, labels, owners) for key, route in places.items()
        ]
        left = [key for key in before if key not in places]
        if entry is not None and left:
            ended = msgspec.structs.replace(
                entry.alert, state=vocabulary.AlertState.RESOLVED, ends_at=event.time
            )
            was = matching.labels_of(entry.alert)
            placements += [
                self._placement(key, before[key], ended, was, entry.owners) for key in left
            ]
        return placements

    def firing(self, fingerprints: Iterable[str]) -> frozenset[str]:
        """Return the fingerprints of the firing alerts among `fingerprints`."""
        entries = ((name, self._entries.get(name)) for name in fingerprints)
        fires = vocabulary.AlertState.FIRING
        return frozenset(name for name, entry in entries if entry and entry.alert.state is fires)

    def route_of(self, group: str) -> routes.Route | None:
        """Return the route whose key is at the start of a group's name; None if there is none."""
        keys = [key for key in self._by_key if group.startswith(f"{key}:{{")]
        return self._by_key[max(keys, key=len)] if keys else None

    def _placement(
        self,
        key: groups.Key,
        route: routes.Route,
        alert: vocabulary.AlertChanged,
        labels: Mapping[str, str],
        owners: Owners,
    ) -> Placement:
        """Return an alert's place in one group; on the route to owners, with only their pods."""
        receiver = key[0]
        if route is self._owners and receiver in owners:
            own = owners[receiver]
            alert = msgspec.structs.replace(alert, pods=own, pods_total=len(own))
        return Placement(key, route, alert, self._group_labels(receiver, route, labels))

    def _places(self, labels: Mapping[str, str], owners: Owners) -> Places:
        places: dict[groups.Key, routes.Route] = {}
        for route in self._root.find(labels):
            for receiver in route.receivers:
                places.setdefault(self._key(receiver, route, labels), route)
        if self._owners is not None:
            for receiver in sorted(set(owners) & set(self._owners.receivers)):
                places.setdefault(self._key(receiver, self._owners, labels), self._owners)
        return places

    def _key(self, receiver: str, route: routes.Route, labels: Mapping[str, str]) -> groups.Key:
        return (
            receiver,
            f"{route.key}:{routes.format_labels(self._group_labels(receiver, route, labels))}",
        )

    def _group_labels(
        self, receiver: str, route: routes.Route, labels: Mapping[str, str]
    ) -> Mapping[str, str]:
        return routes.select_labels(
            labels, (routes.ALL_LABELS,) if receiver in self._ungrouped else route.group_by
        )

    def _store(
        self,
        event: codec.CloudEvent,
        alert: vocabulary.AlertChanged,
        places: Places,
        owners: Owners,
    ) -> None:
        stored = msgspec.structs.replace(
            event,
            id="",
            source=self._intern(event.source),
            type=alert.TYPE,
            time=alert.at,
            instance=self._intern(event.instance),
            boot="",
            data=alert,
        )
        if len(self._place_sets) > _STRINGS_MAX:
            self._place_sets.clear()
        shared = self._place_sets.setdefault(tuple(places), places)
        # move the entry to the end, because the first one is dropped when there are too many
        self._entries.pop(alert.fingerprint, None)
        self._entries[alert.fingerprint] = _Entry(stored, alert, shared, owners)
        if len(self._entries) > _ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]

    def _with_shared_strings(self, alert: vocabulary.AlertChanged) -> vocabulary.AlertChanged:
        """Return the alert with shared strings, to save memory: many alerts are nearly equal."""
        return msgspec.structs.replace(
            alert,
            plugin=self._intern(alert.plugin),
            resource=self._intern(alert.resource),
            advice=self._intern(alert.advice),
            runbook=self._intern(alert.runbook),
            evidence=tuple(
                vocabulary.Evidence(
                    source=self._intern(evidence.source), observed=evidence.observed
                )
                for evidence in alert.evidence
            ),
        )

    def _intern(self, text: str) -> str:
        if len(self._strings) > _STRINGS_MAX:
            self._strings.clear()
        return self._strings.setdefault(text, text)
