"""Adapter for the device plugin of one resource: executes the actions of its registration machine.

Resources are independent: a resource that cannot register never restarts or delays another.
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
    kubelet_socket,
    plugin_sockets,
    protobuf,
    registration,
    server,
)
from muster_plugin.kubelet import registration_signals as model

_REFUSALS_BEFORE_SWITCH: Final = 6
"""After this many refusals, the other registration method is tried.

That many refusals take about a second, which is longer than a restart of the kubelet.
"""
_ADVERTISE_TIMEOUT_S: Final = 0.5
_TEXT_MAX: Final = 300
_PROCESS: Final = os.urandom(settings.PROCESS_BYTES).hex()
"""A random id of this process, because its process id is 1 at every start in a container."""


class Observer(server.Observer, Protocol):
    """Receives the reports of a resource plugin."""

    def on_listing_changed(self, resource: str, report: model.ListingChange, endpoint: str) -> None:
        """React when the kubelet begins or ceases to list a resource."""

    def on_lock_acquired(self) -> None:
        """React when a resource has been locked and is about to be registered."""

    def on_problem_changed(self) -> None:
        """React to the beginning or end of a problem with registration or self-probe."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and periods of one resource plugin; tests shorten them."""

    timeouts: registration.Timeouts = registration.Timeouts()
    probe_s: float = model.PROBE_PERIOD_S


class KubeletDirectory(NamedTuple):
    """The kubelet's directory, and the locks of the resources served there."""

    root: Path
    locks: plugin_sockets.ResourceLocks


class ResourcePlugin:
    """The device plugin of one resource.

    `runner` drives it as a machine, and `act` executes the machine's actions.
    """

    def __init__(
        self,
        resource: str,
        rule: resources.Resource,
        *,
        directory: KubeletDirectory,
        devices: inventory.Inventory,
        runner: machine.MachineRunner[model.Signal, model.Action],
        observer: Observer,
        timing: Timing | None = None,
        reason: vocabulary.RegistrationReason = vocabulary.RegistrationReason.START,
    ) -> None:
        self.resource = resource
        self._method, self._pre_start = rule.registration, rule.pre_start
        timeouts = (timing or Timing()).timeouts
        if self._method is resources.Registration.AUTO:
            timeouts = msgspec.structs.replace(timeouts, refusals_max=_REFUSALS_BEFORE_SWITCH)
        self.machine = registration.Registration(timeouts, reason=reason)
        self.allocator = allocation.Allocator(devices, resource)
        self.counters = server.Counters()
        self.registrations: Counter[vocabulary.RegistrationReason] = Counter()
        self.stopping = asyncio.Event()
        """Set when the resource is removed, handed over, or must be registered differently."""
        self._is_handed_over = False
        self._root, self._locks = directory.root, directory.locks
        self._devices = devices
        self._runner = runner
        self._send = runner.send
        self._observer = observer
        self._reported_state: tuple[bool, bool] = (False, False)
        self._self_probe = client.SelfProbe(
            lambda: self._endpoint,
            send=runner.send,
            on_failure=self._probe_failed,
            period_s=(timing or Timing()).probe_s,
        )
        self._serials = itertools.count(1)
        self._endpoint: server.Endpoint | None = None
        self._registering: asyncio.Task[None] | None = None
        self._uses_watcher = self._method is resources.Registration.WATCHER
        self._registrations_before = 0
        self._last_logged = ""
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._log = logs.logger().bind(resource=resource)

    def is_registered_as(self, rule: resources.Resource) -> bool:
        """Return whether the rule can be applied without a new registration."""
        return (self._method, self._pre_start) == (rule.registration, rule.pre_start)

    def receive(self, event: model.Signal, now: float) -> list[model.Action]:
        """Pass a signal to the machine; return its actions."""
        actions = self.machine.receive(event, now)
        self._report_problem_change()
        return actions

    def tick(self, now: float) -> list[model.Action]:
        """Perform the machine's due transitions; return their actions."""
        actions = self.machine.tick(now)
        self._report_problem_change()
        return actions

    def next_deadline(self) -> float | None:
        """Return when `tick` is next needed; None if no deadline is pending."""
        return self.machine.next_deadline()

    async def act(self, action: model.Action) -> None:
        """Execute an action; its result, if any, is sent to the state machine as a signal."""
        match action:
            case model.Serve(generation=generation):
                await self._serve(generation)
            case model.Register(generation=generation):
                self._registering = asyncio.create_task(self._register(generation))
                self._registering.add_done_callback(self._registering_ended)
            case model.Stop(generation=generation):
                await self.stop()
                self._send(model.Stopped(generation))
            case model.Listed(reason=reason):
                self.registrations[reason] += 1
                self._last_logged = ""
                self._self_probe.due.set()
                self._log.info("registered", reason=reason, endpoint=self._socket_name)
                self._observer.on_listing_changed(self.resource, action, self._socket_name)
            case model.Lost(reason=reason, detail=detail):
                self._log.warning("deregistered", reason=reason, detail=detail)
                self._observer.on_listing_changed(self.resource, action, self._socket_name)
            case _:
                assert_never(action)

    async def advertise(self) -> None:
        """Send a changed list to the kubelet; return when it is sent, or after a timeout."""
        if self._endpoint is not None:
            await self._endpoint.advertise(_ADVERTISE_TIMEOUT_S)

    def check_sockets(self) -> None:
        """Check whether the sockets of the kubelet and the plugin are still the same files."""
        if not self._uses_watcher:
            # the plugin watcher of a restarted kubelet finds the socket by itself
            self._send(model.KubeletSocketSeen(kubelet_socket.identity(self._kubelet)))
        if self._endpoint is not None and self._endpoint.is_socket_lost:
            self._send(model.OwnSocketLost(self._endpoint.generation))

    def on_compared(self, displaced: str, others: frozenset[str]) -> None:
        """Pass on to the machine whether the kubelet lists another plugin's devices."""
        if displaced or self.machine.displacements:
            self._send(model.Compared(self.machine.generation, displaced, others))

    async def run(self) -> None:
        """Run until `stopping` is set; then stop, except if the server was handed over."""
        try:
            async with asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(work)
                    for work in (
                        self._runner.drive(self, self.act),
                        self._self_probe.run(),
                        self._raise_if_failed(),
                    )
                ]
                await self.stopping.wait()
                for task in working:
                    task.cancel()
        finally:
            if not self._is_handed_over:
                await self.stop()

    def hand_over(self) -> str:
        """End everything except the server; return the server's socket, empty without a server."""
        self._is_handed_over = True
        self.stopping.set()
        return str(self._endpoint.path) if self._endpoint else ""

    async def _raise_if_failed(self) -> None:
        """Wait until a registration task fails unexpectedly; raise its error."""
        await self._failed

    async def stop(self) -> None:
        """End a registration in flight, the streams and the server, in this order."""
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.wait([self._registering])
            self._registering = None
        if self._endpoint is not None:
            await self._endpoint.stop()
            self._endpoint = None

    def status(self, now: float) -> vocabulary.ResourceBeat:
        """Return the status of this resource, as heartbeats report it."""
        health = self._devices.count(self.resource)
        conditions = self._devices.conditions(self.resource)
        probe = self._self_probe.last_result
        return vocabulary.ResourceBeat(
            name=self.resource,
            registered_age_s=model.age_s(self.machine.registered_at, now),
            streams=self.machine.streams,
            last_send_age_s=model.age_s(self.counters.sent_at, now),
            registrations=self.machine.registrations,
            probe_ok=probe is not None and probe.ok,
            probe_ms=round(probe.seconds * 1000, model.DIGITS) if probe else 0.0,
            probe_age_s=model.age_s(probe.at if probe else None, now),
            devices=health.total(),
            healthy=health[vocabulary.Health.HEALTHY],
            allocated=self.allocator.allocated,
            problem=self.machine.problem(now),
            short=self._devices.shortage(self.resource),
            degraded=conditions[vocabulary.Condition.DEGRADED],
            unmonitored=conditions[vocabulary.Condition.UNMONITORED],
            kubelet_away=self.machine.is_waiting_for_kubelet(now),
        )

    def _report_problem_change(self) -> None:
        state = self.machine.is_listed, self.machine.is_blocked
        if state != self._reported_state:
            self._reported_state = state
            self._observer.on_problem_changed()

    @property
    def _kubelet(self) -> Path:
        return self._root / settings.SOCKET_DIRECTORY / kubelet_socket.NAME

    @property
    def _socket_name(self) -> str:
        return self._endpoint.path.name if self._endpoint else ""

    async def _serve(self, generation: int) -> None:
        if self._method is resources.Registration.AUTO and generation > 1:
            # switch the method if no registration has succeeded with the last method
            self._uses_watcher ^= self.machine.registrations == self._registrations_before
        self._registrations_before = self.machine.registrations
        owner = self._locks.acquire(self.resource)
        if owner:
            self._log_once("served_elsewhere", owner=owner)
            self._send(model.ServedElsewhere(generation, owner))
            return
        self._observer.on_lock_acquired()
        name = settings.endpoint(self.resource, process=_PROCESS, serial=next(self._serials))
        folder = settings.REGISTRY_DIRECTORY if self._uses_watcher else settings.SOCKET_DIRECTORY
        self._endpoint = server.Endpoint(
            self._root / folder / name,
            generation,
            server.Service(
                resource=self.resource,
                devices=self._devices,
                allocator=self.allocator,
                counters=self.counters,
                pre_start=self._pre_start,
            ),
            send=self._send,
            observer=self._observer,
        )
        try:
            await self._endpoint.start()
        except (OSError, RuntimeError) as error:
            self._log_once("serve_failed", error=str(error), socket=name)
            await self.stop()
            self._send(model.ServeFailed(generation, str(error)[:_TEXT_MAX]))
        else:
            self._send(model.Served(generation))

    async def _register(self, generation: int) -> None:
        assert self._endpoint is not None, "served before it is registered"
        try:
            if self._uses_watcher:
                kubelet = await client.wait_for_plugin_watcher(self._endpoint)
            else:
                kubelet = await client.register(
                    self._kubelet,
                    self.resource,
                    self._socket_name,
                    pre_start=self._pre_start,
                )
        except client.Refused as refusal:
            self._refused(generation, refusal)
        else:
            self._send(model.Registered(generation, kubelet))

    def _refused(self, generation: int, refusal: client.Refused) -> None:
        text = str(refusal)[:_TEXT_MAX]
        permanent = protobuf.is_permanent(refusal.code, refusal.details)
        self._log_once("register_failed", error=text, kubelet=str(self._kubelet))
        self._send(model.RegisterFailed(generation, text, permanent, refusal.unreachable))

    def _probe_failed(self, endpoint: server.Endpoint, error: str, is_first: bool) -> None:  # noqa: FBT001  # called by SelfProbe alone
        if is_first:
            self._observer.on_problem_changed()
        self._log_once("probe_failed", error=error, socket=endpoint.path.name)

    def _log_once(self, event: str, **facts: str) -> None:
        """Log a failure when it begins or changes, but not its repetitions."""
        failure = f"{event}: {facts}"
        if self._socket_name:
            # every attempt has a different socket name
            failure = failure.replace(self._socket_name, "")
        if self._last_logged != failure:
            self._last_logged = failure
            self._log.warning(event, **facts)

    def _registering_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)
