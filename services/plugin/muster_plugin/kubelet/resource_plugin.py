"""Adapter: the kubelet: one resource's life with it.

Does what the registration machine says, and tells it what happened. One life concerns one resource
only: one that cannot register never restarts or delays another.
"""

import asyncio
import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple, Protocol, assert_never

import msgspec

from muster import machine, vocabulary
from muster.service import logs
from muster_plugin.config import resources, settings
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import (
    allocation,
    client,
    protobuf,
    registration,
    registration_events,
    resource_locks,
    resource_status,
    self_probe,
    server,
    socket_directory,
)

_REFUSALS_BEFORE_OTHER_WAY: Final = 6
"""About a second of refusals, longer than it takes a kubelet to restart."""
_ADVERTISE_TIMEOUT_S: Final = 0.5
_TEXT_MAX: Final = 300
_PROCESS: Final = os.urandom(settings.PROCESS_BYTES).hex()
"""Not the process id: in a container that is 1 at every start."""


class Listener(server.Observer, Protocol):
    """Who is told what happens in a life."""

    def reported(self, resource: str, report: registration_events.Report, endpoint: str) -> None:
        """Hear that the kubelet lists a resource, or has lost it."""

    def claimed(self, resource: str) -> None:
        """Hear that nobody else serves a resource, which is about to be registered."""

    def problem_changed(self) -> None:
        """Hear that something began to keep a resource from the kubelet, or no longer does."""


class Periods(msgspec.Struct, frozen=True, kw_only=True):
    """How patient one life is; other than by default only where time must pass faster."""

    patient: registration.Timeouts = registration.Timeouts()
    probe_s: float = self_probe.PERIOD_S


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet learns when a resource is registered; a change needs a new registration."""

    registration: resources.Registration = resources.Registration.REGISTER
    pre_start: bool = False


class Place(NamedTuple):
    """The kubelet's directory, and what may be served there by nobody but us."""

    root: Path
    claims: resource_locks.Claims


class Life:
    """One resource's life with the kubelet.

    It is the machine that `line` drives, and `act` is what it makes of the machine's actions.
    `hears` is told of what others want to know.
    """

    def __init__(
        self,
        resource: str,
        terms: Terms,
        *,
        place: Place,
        devices: inventory.Inventory,
        line: machine.Line[registration_events.Signal, registration_events.Action],
        hears: Listener,
        periods: Periods | None = None,
        reason: vocabulary.RegistrationReason = vocabulary.RegistrationReason.START,
    ) -> None:
        self.resource = resource
        self.terms = terms
        patient = (periods or Periods()).patient
        if terms.registration is resources.Registration.AUTO:
            patient = msgspec.structs.replace(patient, refusals_max=_REFUSALS_BEFORE_OTHER_WAY)
        self.machine = registration.Registration(patient, reason=reason)
        self.allocator = allocation.Allocator(devices, resource, lambda: devices.terms)
        self.figures = server.Figures()
        self.registrations: Counter[vocabulary.RegistrationReason] = Counter()
        self.over = asyncio.Event()
        """Set when the resource is not to be advertised any more, or not on these terms."""
        self._root, self._claims = place.root, place.claims
        self._devices = devices
        self._line = line
        self._tell = line.tell
        self._hears = hears
        self._stood: tuple[bool, bool] = (False, False)
        self._probing = self_probe.Probing(
            lambda: self._endpoint,
            tell=line.tell,
            failed=self._probe_failed,
            period_s=(periods or Periods()).probe_s,
        )
        self._serials = itertools.count(1)
        self._endpoint: server.Endpoint | None = None
        self._registering: asyncio.Task[None] | None = None
        self._is_watched = terms.registration is resources.Registration.WATCHER
        self._taken = 0
        self._told = ""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log = logs.logger().bind(resource=resource)

    def receive(
        self, event: registration_events.Signal, now: float
    ) -> list[registration_events.Action]:
        """Let the machine take a signal."""
        actions = self.machine.receive(event, now)
        self._notice()
        return actions

    def tick(self, now: float) -> list[registration_events.Action]:
        """Let the machine do what is due."""
        actions = self.machine.tick(now)
        self._notice()
        return actions

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self.machine.next_deadline()

    async def act(self, action: registration_events.Action) -> None:
        """Do what the machine says; the answer comes back as a signal."""
        match action:
            case registration_events.Serve(generation=generation):
                await self._serve(generation)
            case registration_events.Register(generation=generation):
                self._registering = asyncio.create_task(self._register(generation))
                self._registering.add_done_callback(self._registering_ended)
            case registration_events.End(generation=generation):
                await self.end()
                self._tell(registration_events.Ended(generation))
            case registration_events.Listed(reason=reason):
                self.registrations[reason] += 1
                self._told = ""
                self._probing.now.set()
                self._log.info("registered", reason=reason, endpoint=self._name)
                self._hears.reported(self.resource, action, self._name)
            case registration_events.Lost(reason=reason, detail=detail):
                self._log.warning("deregistered", reason=reason, detail=detail)
                self._hears.reported(self.resource, action, self._name)
            case _:
                assert_never(action)

    async def advertise(self) -> None:
        """Bring a change to the kubelet; return when every open stream has it, or is too slow."""
        if self._endpoint is not None:
            await self._endpoint.advertise(_ADVERTISE_TIMEOUT_S)

    def look(self) -> None:
        """See whether the sockets of kubelet and plugin are still the ones we know."""
        if not self._is_watched:
            # the plugin watcher of a new kubelet finds our socket by itself
            self._tell(registration_events.KubeletSeen(socket_directory.identity(self._kubelet)))
        if self._endpoint is not None and self._endpoint.is_lost:
            self._tell(registration_events.OwnSocketLost(self._endpoint.generation))

    async def live(self) -> None:
        """Live until `over` is set; then nothing of it is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(work)
                    for work in (
                        self._line.drive(self, self.act),
                        self._probing.follow(),
                        self._fail_if_broken(),
                    )
                ]
                await self.over.wait()
                for task in working:
                    task.cancel()
        finally:
            await self.end()

    async def _fail_if_broken(self) -> None:
        """Wait for ever; raise what a task of this life could not handle."""
        await self._broken

    async def end(self) -> None:
        """End a registration in flight, the streams and the server, in this order."""
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait([self._registering])
            self._registering = None
        if self._endpoint is not None:
            await self._endpoint.stop()
            self._endpoint = None

    def state(self, now: float) -> resource_status.ResourceState:
        """Return what the heartbeat tells about this resource."""
        health = self._devices.count(self.resource)
        return resource_status.ResourceState(
            name=self.resource,
            registered_at=self.machine.registered_at,
            streams=self.machine.streams,
            sent_at=self.figures.sent_at,
            registrations=self.machine.registrations,
            probe=self._probing.last,
            devices=health.total(),
            healthy=health[vocabulary.Health.HEALTHY],
            allocated=self.allocator.allocated,
            problem=self.machine.problem(now),
            away=self.machine.is_kubelet_away(now),
            short=self._devices.shortage(self.resource),
            conditions=self._devices.conditions(self.resource),
        )

    def _notice(self) -> None:
        stands = self.machine.is_listed, self.machine.is_kept_out
        if stands != self._stood:
            self._stood = stands
            self._hears.problem_changed()

    @property
    def _kubelet(self) -> Path:
        return self._root / settings.SOCKET_DIRECTORY / socket_directory.KUBELET_SOCKET

    @property
    def _name(self) -> str:
        return self._endpoint.path.name if self._endpoint else ""

    async def _serve(self, generation: int) -> None:
        if self.terms.registration is resources.Registration.AUTO and generation > 1:
            # a way on which nobody took us is left for the other
            self._is_watched ^= self.machine.registrations == self._taken
        self._taken = self.machine.registrations
        owner = self._claims.claim(self.resource)
        if owner:
            self._log_once("served_elsewhere", owner=owner)
            self._tell(registration_events.ServedElsewhere(generation, owner))
            return
        self._hears.claimed(self.resource)
        name = settings.endpoint(self.resource, process=_PROCESS, serial=next(self._serials))
        folder = settings.REGISTRY_DIRECTORY if self._is_watched else settings.SOCKET_DIRECTORY
        self._endpoint = server.Endpoint(
            self._root / folder / name,
            generation,
            server.Service(
                resource=self.resource,
                devices=self._devices,
                allocator=self.allocator,
                figures=self.figures,
                pre_start=self.terms.pre_start,
            ),
            tell=self._tell,
            observer=self._hears,
        )
        try:
            await self._endpoint.start()
        except (OSError, RuntimeError) as error:
            self._log_once("serve_failed", error=str(error), socket=name)
            await self.end()
            self._tell(registration_events.ServeFailed(generation, str(error)[:_TEXT_MAX]))
        else:
            self._tell(registration_events.Served(generation))

    async def _register(self, generation: int) -> None:
        assert self._endpoint is not None, "served before it is registered"
        try:
            if self._is_watched:
                kubelet = await client.be_found(self._endpoint)
            else:
                kubelet = await client.register(
                    self._kubelet, self.resource, self._name, pre_start=self.terms.pre_start
                )
        except client.Refused as no:
            self._refused(generation, no)
        else:
            self._tell(registration_events.Registered(generation, kubelet))

    def _refused(self, generation: int, no: client.Refused) -> None:
        text = str(no)[:_TEXT_MAX]
        permanent = protobuf.is_permanent(no.code, no.details)
        self._log_once("register_failed", error=text, kubelet=str(self._kubelet))
        self._tell(registration_events.RegisterFailed(generation, text, permanent, no.away))

    def _probe_failed(self, probed: server.Endpoint, error: str, is_news: bool) -> None:  # noqa: FBT001  # called by Probing alone
        if is_news:
            self._hears.problem_changed()
        self._log_once("probe_failed", error=error, socket=probed.path.name)

    def _log_once(self, event: str, **facts: str) -> None:
        """Log a failure when it begins, or turns into another; not again while it repeats."""
        told = f"{event}: {facts}"
        if self._name:
            # which is another at every try
            told = told.replace(self._name, "")
        if self._told != told:
            self._told = told
            self._log.warning(event, **facts)

    def _registering_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)
