"""Door to the kubelet: one resource's life with it.

Does what the registration machine says, and tells it what happened. One life concerns one resource
only: one that cannot register never restarts or delays another.
"""

import asyncio
import itertools
import os
import time
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple, Protocol, assert_never

import grpc
import grpc.aio
import msgspec

from muster import logs, vocabulary
from muster.pb import rpc
from muster_plugin import (
    allocation,
    beats,
    claims,
    config,
    directory,
    endpoint,
    inventory,
    lines,
    patience,
    registration,
    rules,
    signals,
    wire,
)

# The kubelet dials us back within our Register, for up to 10 s (pluginmanager, dial with block).
_REGISTER_TIMEOUT_S: Final = 12.0
_FIND_TIMEOUT_S: Final = 10.0
_REFUSALS_BEFORE_OTHER_WAY: Final = 6
"""About a second of refusals, longer than it takes a kubelet to restart."""
_ADVERTISE_TIMEOUT_S: Final = 0.5
PROBE_PERIOD_S: Final = 14.0
"""A probe costs a connection, half of what an idle plugin does; that the socket is ours is looked
at far more often. Somebody who serves and does not answer is to be found within 20 s: after this
period, the probe's own 2 s, and the 3 s that health gives him to mend."""
_PROBE_AGAIN_S: Final = 0.2
_TEXT_MAX: Final = 300
_PROCESS: Final = os.urandom(config.PROCESS_BYTES).hex()
"""Not the process id: in a container that is 1 at every start."""


class Listener(endpoint.Observer, Protocol):
    """Who is told what happens in a life."""

    def reported(self, resource: str, report: signals.Report, endpoint: str) -> None:
        """Hear that the kubelet lists a resource, or has lost it."""

    def claimed(self, resource: str) -> None:
        """Hear that nobody else serves a resource, which is about to be registered."""

    def problem_changed(self) -> None:
        """Hear that something began to keep a resource from the kubelet, or no longer does."""


class Periods(msgspec.Struct, frozen=True, kw_only=True):
    """How patient one life is; other than by default only where time must pass faster."""

    patient: patience.Patience = patience.Patience()
    probe_s: float = PROBE_PERIOD_S


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the kubelet learns when a resource is registered; a change needs a new registration."""

    registration: rules.Registration = rules.Registration.REGISTER
    pre_start: bool = False


class Place(NamedTuple):
    """The kubelet's directory, and what may be served there by nobody but us."""

    root: Path
    claims: claims.Claims


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
        line: lines.Line[signals.Signal, signals.Action],
        hears: Listener,
        periods: Periods | None = None,
        reason: vocabulary.RegistrationReason = vocabulary.RegistrationReason.START,
    ) -> None:
        self.resource = resource
        self.terms = terms
        patient = (periods or Periods()).patient
        if terms.registration is rules.Registration.AUTO:
            patient = msgspec.structs.replace(patient, refusals_max=_REFUSALS_BEFORE_OTHER_WAY)
        self.machine = registration.Registration(patient, reason=reason)
        self.allocator = allocation.Allocator(devices, resource, lambda: devices.terms)
        self.figures = endpoint.Figures()
        self.registrations: Counter[vocabulary.RegistrationReason] = Counter()
        self.probe: beats.Probe | None = None
        self.over = asyncio.Event()
        """Set when the resource is not to be advertised any more, or not on these terms."""
        self._root, self._claims = place.root, place.claims
        self._devices = devices
        self._line = line
        self._tell = line.tell
        self._hears = hears
        self._was_listed = False
        self._probe_s = (periods or Periods()).probe_s
        self._probe_now = asyncio.Event()
        self._serials = itertools.count(1)
        self._endpoint: endpoint.Endpoint | None = None
        self._registering: asyncio.Task[None] | None = None
        self._is_watched = terms.registration is rules.Registration.WATCHER
        self._taken = 0
        self._told = ""
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log = logs.logger().bind(resource=resource)

    def receive(self, event: signals.Signal, now: float) -> list[signals.Action]:
        """Let the machine take a signal."""
        actions = self.machine.receive(event, now)
        self._notice()
        return actions

    def tick(self, now: float) -> list[signals.Action]:
        """Let the machine do what is due."""
        actions = self.machine.tick(now)
        self._notice()
        return actions

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed."""
        return self.machine.next_deadline()

    async def act(self, action: signals.Action) -> None:
        """Do what the machine says; the answer comes back as a signal."""
        match action:
            case signals.Serve(generation=generation):
                await self._serve(generation)
            case signals.Register(generation=generation):
                self._registering = asyncio.create_task(self._register(generation))
                self._registering.add_done_callback(self._registering_ended)
            case signals.End(generation=generation):
                await self.end()
                self._tell(signals.Ended(generation))
            case signals.Listed(reason=reason):
                self.registrations[reason] += 1
                self._told = ""
                self._probe_now.set()
                self._log.info("registered", reason=reason, endpoint=self._name)
                self._hears.reported(self.resource, action, self._name)
            case signals.Lost(reason=reason, detail=detail):
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
            self._tell(signals.KubeletSeen(directory.identity(self._kubelet)))
        if self._endpoint is not None and self._endpoint.is_lost:
            self._tell(signals.OwnSocketLost(self._endpoint.generation))

    async def live(self) -> None:
        """Live until `over` is set; then nothing of it is left."""
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(work)
                    for work in (
                        self._line.drive(self, self.act),
                        self._probe_for_ever(),
                        self._fail_if_broken(),
                    )
                ]
                await self.over.wait()
                for task in working:
                    task.cancel()
        finally:
            await self.end()

    async def _probe_for_ever(self) -> None:
        """Dial our own socket by its path: once listed, then on a period, soon after a failure."""
        wait_s = self._probe_s
        while True:
            try:
                async with asyncio.timeout(wait_s):
                    await self._probe_now.wait()
            except TimeoutError:
                pass
            self._probe_now.clear()
            wait_s = self._probe_s
            if self._endpoint is not None and not await self._probe(self._endpoint):
                wait_s = min(self._probe_s, _PROBE_AGAIN_S)

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

    def state(self, now: float) -> beats.ResourceState:
        """Return what the heartbeat tells about this resource."""
        health = self._devices.count(self.resource)
        return beats.ResourceState(
            name=self.resource,
            registered_at=self.machine.registered_at,
            streams=self.machine.streams,
            sent_at=self.figures.sent_at,
            registrations=self.machine.registrations,
            probe=self.probe,
            devices=health.total(),
            healthy=health[vocabulary.Health.HEALTHY],
            allocated=self.allocator.allocated,
            problem=self.machine.problem(now),
            short=self._devices.shortage(self.resource),
            conditions=self._devices.conditions(self.resource),
        )

    def _notice(self) -> None:
        if self.machine.is_listed != self._was_listed:
            self._was_listed = self.machine.is_listed
            self._hears.problem_changed()

    @property
    def _kubelet(self) -> Path:
        return self._root / config.SOCKET_DIRECTORY / directory.KUBELET_SOCKET

    @property
    def _name(self) -> str:
        return self._endpoint.path.name if self._endpoint else ""

    async def _serve(self, generation: int) -> None:
        if self.terms.registration is rules.Registration.AUTO and generation > 1:
            # a way on which nobody took us is left for the other
            self._is_watched ^= self.machine.registrations == self._taken
        self._taken = self.machine.registrations
        owner = self._claims.claim(self.resource)
        if owner:
            self._log_once("served_elsewhere", owner=owner)
            self._tell(signals.ServedElsewhere(generation, owner))
            return
        self._hears.claimed(self.resource)
        name = config.endpoint(self.resource, process=_PROCESS, serial=next(self._serials))
        folder = config.REGISTRY_DIRECTORY if self._is_watched else config.SOCKET_DIRECTORY
        self._endpoint = endpoint.Endpoint(
            self._root / folder / name,
            generation,
            endpoint.Service(
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
            self._tell(signals.ServeFailed(generation, str(error)[:_TEXT_MAX]))
        else:
            self._tell(signals.Served(generation))

    async def _register(self, generation: int) -> None:
        if self._is_watched:
            await self._be_found(generation)
            return
        kubelet = directory.identity(self._kubelet)
        if not kubelet:
            self._refused(generation, "UNAVAILABLE", f"{directory.KUBELET_SOCKET} is missing")
            return
        # A fresh channel with its own pool: after a refused dial, gRPC's own would wait for 1 s.
        options = endpoint.OWN_POOL
        request = wire.register_request(self.resource, self._name, pre_start=self.terms.pre_start)
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet}", options=options) as channel:
            try:
                await rpc.RegistrationClient(channel).register(request, timeout=_REGISTER_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self._refused(generation, error.code().name, error.details() or "")
            else:
                self._tell(signals.Registered(generation, kubelet))

    async def _be_found(self, generation: int) -> None:
        """Wait for the kubelet's plugin watcher, which looks for sockets by itself."""
        assert self._endpoint is not None, "served before it is registered"
        try:
            async with asyncio.timeout(_FIND_TIMEOUT_S):
                error = await self._endpoint.noticed()
        except TimeoutError:
            text = f"no plugin watcher looked into {self._endpoint.path.parent}"
            self._refused(generation, "UNAVAILABLE", f"{text} for {_FIND_TIMEOUT_S:g} s")
            return
        if error:
            self._refused(generation, "UNKNOWN", error)
        else:
            # a new kubelet takes us by itself, so this one's kubelet.sock would prove nothing
            self._tell(signals.Registered(generation, ""))

    def _refused(self, generation: int, code: str, details: str) -> None:
        text = f"{code}: {details}"[:_TEXT_MAX]
        permanent = wire.is_permanent(code, details)
        self._log_once("register_failed", error=text, kubelet=str(self._kubelet))
        self._tell(signals.RegisterFailed(generation, text, permanent))

    async def _probe(self, probed: endpoint.Endpoint) -> bool:
        try:
            seconds = await probed.probe()
        except endpoint.ProbeFailed as failure:
            was_ok = self.probe is None or self.probe.ok
            self.probe = beats.Probe(ok=False, seconds=0.0, at=time.monotonic())
            if was_ok:
                self._hears.problem_changed()
            self._log_once("probe_failed", error=str(failure), socket=probed.path.name)
            self._tell(signals.ProbeFailed(probed.generation, str(failure)[:_TEXT_MAX]))
            return False
        self.probe = beats.Probe(ok=True, seconds=seconds, at=time.monotonic())
        self._tell(signals.ProbePassed(probed.generation))
        return True

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
