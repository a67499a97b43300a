"""Pure: determines which socket serves which resource of a node, and what is wrong with a plugin.

It receives observations, and returns probes to make and changes to report. A plugin is watched
under the name of its resource or driver, or of its socket while neither is known. These are not
failures:

- a leftover socket: connections to it have been refused since it was first seen, and its resource
  is served by another socket or was never offered;
- a socket that an on-demand plugin removed, or that disappeared with a process whose resource is
  unknown;
- any condition while the kubelet is away, for up to 5 minutes, or within 30 s of its start, because
  a starting kubelet removes all sockets;
- 0 devices of all resources at the same time, for a short time.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, assert_never

import msgspec

from muster import vocabulary
from muster_plugin.config import settings
from muster_plugin.config import watch as config_watch
from muster_plugin.watch import (
    expectation,
    finding,
    listings,
    naming,
    observation,
    reports,
    sockets,
)

_Server = finding.Server
_Finding = vocabulary.WatchedFinding
_Kind = vocabulary.WatchedKind
_PODS_MAX: Final = 5
_OUR_DRIVERS: Final = ".muster.dev"
_EVALUATED_S: Final = 3600.0
_EVALUATED_AGAIN_S: Final = 0.05
"""Observations that arrive within this time are evaluated together."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long the model waits, in seconds."""

    kubelet_settles_s: float = 30.0
    """How long a kubelet counts as just started.

    A starting kubelet removes the sockets; its plugins then need time to register again.
    """
    hardware_s: float = 300.0
    """How long plugins may take to offer the hardware, from the start of this process."""
    report_s: float = 1.0
    holds: finding.Holds = finding.Holds()


class NodeModel:
    """The watched plugins of one node; `ours` are the resources that this process serves."""

    def __init__(
        self,
        watch: config_watch.Watch,
        *,
        memory: expectation.Memory,
        timing: Timing,
        now: float,
    ) -> None:
        self.ours: frozenset[str] = frozenset()
        self._sockets = sockets.Sockets()
        self._watch = watch
        self._timing = timing
        self._listings = listings.Listings(
            watch.expect, memory.expected, settles_s=timing.kubelet_settles_s, now=now
        )
        self._resource_names = {**memory.resources}
        self._reports = reports.Reports(
            watch.expect, timing.holds, period_s=timing.report_s, now=now
        )
        self._our_slugs: frozenset[str] = frozenset()
        self._hardware: Mapping[str, str] = {}
        self._files_missing: Mapping[str, tuple[str, ...]] = {}
        self._hardware_due_at = now + timing.hardware_s
        self._has_scanned = False
        self._has_learned = False
        self._has_changed = True
        self._evaluated_again_at = now
        self._evaluated_at = -math.inf
        self._foreign: Sequence[str] = ()
        """The resources of plugins that muster does not run: listed, or expected."""
        self._by_last_part: Mapping[str, Sequence[str]] = {}

    # Queries

    @property
    def memory(self) -> expectation.Memory:
        """The learned data to save to a file."""
        return expectation.Memory(
            expected=self._listings.expectations.learned, resources=self._resource_names
        )

    @property
    def watched(self) -> tuple[vocabulary.Watched, ...]:
        """All watched plugins, at most WATCHED_MAX: those with a finding first."""
        return self._reports.watched

    @property
    def restarts(self) -> int:
        """How many times another process began to serve a watched socket."""
        return sum(max(0, socket.servers - 1) for socket in self._sockets)

    @property
    def left_out(self) -> int:
        """How many sockets and plugins are not watched because there are too many."""
        return self._sockets.left_out + self._reports.left_out

    # Events

    def receive(
        self, observed: observation.Observation, now: float
    ) -> Sequence[observation.Action]:
        """Record an observation; return the actions that are due."""
        match observed:
            case observation.Scanned():
                self._record_scan(observed, now)
            case observation.Probed():
                self._sockets.record_probe(observed, now)
            case observation.ProcessEnded():
                self._sockets.record_end(observed, now)
            case observation.ProcessesSeen(halted=halted):
                self._sockets.record_halted(halted)
            case observation.Listed():
                self._probe_soon(self._listings.record(observed, self.ours, now), now)
            case observation.Registered(counts=counts):
                self._listings.record_registered(counts, now)
            case observation.HardwareSeen(hardware=hardware):
                self._has_changed |= hardware != self._hardware
                self._hardware = hardware
            case observation.FilesMissing(devices=devices):
                self._has_changed |= devices != self._files_missing
                self._files_missing = devices
            case _:
                assert_never(observed)
        return self.tick(now)

    def tick(self, now: float) -> Sequence[observation.Action]:
        """Return the actions that are due."""
        actions: list[observation.Action] = [*self._sockets.due(now)]
        if self._has_changed or self._sockets.has_changed or self._listings.has_changed:
            self._has_changed = self._sockets.has_changed = self._listings.has_changed = False
            soon = max(now, self._evaluated_at + _EVALUATED_AGAIN_S)
            self._evaluated_again_at = min(self._evaluated_again_at, soon)
        if now >= self._evaluated_again_at:
            self._evaluated_at = now
            actions += self._evaluate(now)
        if self._has_learned or self._listings.has_learned:
            self._has_learned = self._listings.has_learned = False
            actions.append(observation.Learned())
        return actions

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        probe_at = self._sockets.next_deadline()
        again_at = self._evaluated_again_at
        return again_at if probe_at is None else min(probe_at, again_at)

    def _evaluate(self, now: float) -> list[observation.Action]:
        """Evaluate the facts about every plugin; return the changes."""
        self._list_foreign()
        groups = self._sockets_by_name(now)
        self._forget_removed(groups, now)
        zero_until = self._listings.zero_until(self._foreign)
        facts = self._facts(groups, now, is_zero=now < zero_until)
        actions, deadlines = self._reports.update(facts, now)
        later = self._listings.held_until, self._hardware_due_at, zero_until
        deadlines += [now + _EVALUATED_S, *(at for at in later if at > now)]
        self._evaluated_again_at = max(now + _EVALUATED_AGAIN_S, min(deadlines))
        return actions

    # Observations

    def _record_scan(self, scanned: observation.Scanned, now: float) -> None:
        self._listings.record_kubelet(scanned.kubelet_age_s, scanned.kubelet_identity, now)
        self._has_changed |= not self._has_scanned or scanned.ours != self._our_slugs
        self._has_scanned, self._our_slugs = True, scanned.ours
        files = tuple(file for file in scanned.sockets if not self._watch.ignores(file.name))
        self._sockets.record_scan(files, now)

    def _probe_soon(self, dropped: Sequence[str], now: float) -> None:
        """Schedule early probes of sockets that may serve resources which the kubelet dropped."""
        dropped_or_unknown = {*dropped, None}
        for socket in self._sockets if dropped else ():
            if self._resource_of(socket) in dropped_or_unknown:
                socket.hurry(now)

    # Which socket serves which resource

    def _sockets_by_name(self, now: float) -> dict[str, list[sockets.Socket]]:
        """Return sockets by their resource or driver, or by their own name if neither is known."""
        self._learn_names(now)
        by_name: dict[str, list[sockets.Socket]] = {}
        for socket in self._sockets:
            by_name.setdefault(self._resource_of(socket) or socket.file.name, []).append(socket)
        return by_name

    def _resource_of(self, socket: sockets.Socket) -> str | None:
        if socket.driver is not None:
            return socket.driver.name
        name = socket.file.name
        if socket.file.directory is observation.Directory.REGISTRY:
            return None
        known = naming.resource(name) or self._resource_names.get(naming.stem(name))
        return known or naming.resource_among(name, self._by_last_part)

    def _list_foreign(self) -> None:
        """List the resources of other plugins, once per evaluation, for comparison with sockets."""
        foreign = sorted(name for name in self._listings.resources if not self._is_ours(name))
        self._foreign, self._by_last_part = foreign, naming.by_last_part(foreign)

    def _learn_names(self, now: float) -> None:
        """Assign a resource to a socket if only these two appeared or vanished together."""
        nameless = [each for each in self._sockets if each.has_answered]
        nameless = [each for each in nameless if self._resource_of(each) is None]
        if not nameless:
            return
        served = {self._resource_of(socket) for socket in self._sockets}
        unserved = [name for name in self._foreign if name not in served]
        for is_up in (True, False):
            new = [
                socket
                for socket in nameless
                if now - socket.changed_at <= listings.TOGETHER_S
                and socket.file.directory is observation.Directory.PLUGINS
                and socket.is_usable is is_up
            ]
            changed = [
                name
                for name in unserved
                if now - self._listings[name].changed_at <= listings.TOGETHER_S
                and bool(self._listings[name].count) is is_up
            ]
            has_room = len(self._resource_names) < listings.RESOURCES_MAX
            if len(new) == 1 and len(changed) == 1 and has_room:
                self._resource_names[naming.stem(new[0].file.name)] = changed[0]
                self._has_learned = True
                return

    def _forget_removed(self, groups: Mapping[str, Sequence[sockets.Socket]], now: float) -> None:
        """Remove the state of replaced sockets, and of plugins that have long been gone."""
        for name, group in groups.items():
            has_other = any(not socket.is_removed for socket in group)
            newest = max((each.file.created_at for each in group if each.is_usable), default=0)
            for socket in group:
                is_running = socket.process is not None and not socket.has_ended
                is_missed = is_running or (
                    now - socket.changed_at < listings.FORGOTTEN_S
                    and (socket.driver is not None or bool(self._listings.expected(name)))
                    and not naming.is_on_demand(name)
                )
                if socket.is_removed and (has_other or not is_missed):
                    self._sockets.forget(socket.file.path)
                elif socket.is_dead and socket.file.created_at < newest:
                    self._sockets.stop_watching(socket.file.path, now)
        for name in self._foreign:
            if all(socket.is_removed for socket in groups.get(name, ())):
                self._listings.forget_if_old(name, now)

    # Evaluation

    def _facts(
        self,
        groups: Mapping[str, Sequence[sockets.Socket]],
        now: float,
        *,
        is_zero: bool,
    ) -> reports.FactsByName:
        """Return the facts about every plugin, and its description, by name."""
        is_held = now < self._listings.held_until
        answered = (socket for socket in self._sockets if socket.has_answered)
        is_nameless = any(self._resource_of(socket) is None for socket in answered)
        facts = {}
        for name in sorted(groups.keys() | set(self._foreign)):
            if self._is_ours(name) or self._watch.ignores(name):
                continue
            socket = sockets.best(groups.get(name, ()))
            listed = self._listings.count(name)
            expected = self._listings.expected(name)
            if not self._is_watched(name, socket, listed, expected):
                continue
            server, detail = self._server(name, socket, listed, is_nameless=is_nameless)
            can_wait = is_zero and server in {_Server.ANSWERS, _Server.UNKNOWN}
            known = finding.Facts(
                server=server,
                detail=detail,
                listed=listed,
                expected=expected,
                rival=sockets.rival(groups.get(name, ())),
                files_missing=self._files_missing.get(name, ()),
                is_held=is_held or can_wait,
            )
            facts[name] = known, self._description(name, socket, listed, expected)
        return {**facts, **self._not_offered(facts.keys(), now)}

    def _is_watched(
        self, name: str, socket: sockets.Socket | None, listed: int | None, expected: int | None
    ) -> bool:
        if listed or expected:
            return socket is not None or not naming.is_on_demand(name)
        if socket is None or socket.answer is None:
            return False
        # a socket that never answers may be other software's, unless it is named like a plugin's
        is_hanging = socket.answer is observation.Answer.SILENT and "/" in name
        return socket.has_answered or is_hanging

    def _server(
        self, name: str, socket: sockets.Socket | None, listed: int | None, *, is_nameless: bool
    ) -> tuple[_Server, str]:
        if socket is not None:
            return socket.server(listed)
        if not self._has_scanned or is_nameless or listed != 0:
            return _Server.UNKNOWN, f"it is unknown which socket serves {name}"
        return _Server.ENDED, "no socket in the kubelet's directory matches it"

    def _description(
        self,
        name: str,
        socket: sockets.Socket | None,
        listed: int | None,
        expected: int | None,
    ) -> vocabulary.Watched:
        process = socket.process if socket is not None else None
        allocated = self._listings.listed.allocated
        has_pid = process is not None and process.pid is not None
        return vocabulary.Watched(
            name=name,
            kind=socket.driver.kind if socket and socket.driver else _Kind.DEVICE_PLUGIN,
            socket=socket.file.path if socket else "",
            expected=expected,
            listed=listed,
            allocated=None if allocated is None else allocated.get(name, 0),
            process=f"{process.pid} ({process.name})" if process and has_pid else "",
            pod=process.pod if process else "",
            pods=self._listings.listed.pods.get(name, ())[:_PODS_MAX],
        )

    def _not_offered(self, watched: Iterable[str], now: float) -> reports.FactsByName:
        """Return the facts about hardware that nothing on the node has ever offered."""
        if now < self._hardware_due_at:
            return {}
        offered = {*watched, *self.ours, *self._listings.resources, *self._resource_names.values()}
        facts = {}
        for name, text in self._hardware.items():
            domain = name.partition("/")[0]
            is_offered = any(each.partition("/")[0].endswith(domain) for each in offered)
            if not is_offered and not self._watch.ignores(name) and not self._is_ours(name):
                known = finding.Facts(server=_Server.ABSENT, detail=text)
                facts[name] = known, vocabulary.Watched(name=name)
        return facts

    # Names

    def _is_ours(self, name: str) -> bool:
        is_driver = name.endswith(_OUR_DRIVERS)
        return is_driver or name in self.ours or settings.slug(name) in self._our_slugs
