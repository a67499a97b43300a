"""Adapter for a cluster, NATS and HTTP: makes the observations for `muster doctor`.

Every observation has its own time limit, and none continues after the time limit of the run. A
failure is also an observation: `NotSeen` contains the reason.
"""

import asyncio
import contextlib
import os
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

from muster import client
from muster.cli import doctor_bus, health, reach
from muster.cli.doctor_facts import (
    LOCKS,
    Broken,
    Bus,
    Leader,
    NotSeen,
    Observations,
)
from muster.fleet import health_client, health_state
from muster.kubernetes import installation
from muster.nats import bus, connection
from muster.service import runtime

if TYPE_CHECKING:
    from muster.cli import cluster as clusters

_CHECK_SHARE: Final = 1 / 3
_REQUEST_SHARE: Final = 1 / 6
"""The parts of the run's time limit for each check (`_CHECK_SHARE`) and each of its requests."""
_METRICS_BYTES_MAX: Final = 1024 * 1024
"""Enough for the version, which comes first; health's series for each node come at the end."""
_SERVICES: Final = ("muster-health", "muster-labeler", "muster-notifier", "muster-gate")
"""The parts that report their version by HTTP; a plugin's version is in its heartbeats."""
_SERVICES_MAX: Final = 12
_READS_AT_ONCE: Final = 3
"""Each read takes one of the loop's few threads, of which aiohttp needs one to look up proxies."""
_VERSION: Final = re.compile(r'^muster_build_info\{[^}\n]*version="([^"\n]*)"', re.MULTILINE)
_TIMESTAMP: Final = re.compile(
    r"^(muster_leader_since|muster_bus_certificate_ends)_timestamp_seconds ([0-9.e+]+)$",
    re.MULTILINE,
)

Seen = TypeVar("Seen")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The installation to check: a cluster or addresses; by default, the one on this machine."""

    context: str | None
    namespace: str
    url: str | None
    health: str | None
    within_s: float
    """The time limit of the run."""

    @property
    def is_named(self) -> bool:
        """Whether the user named a cluster or an address."""
        return bool(self.context or self.url or self.health)


@contextlib.asynccontextmanager
async def opened(
    target: Target, progress: Progress, reasons: Sequence[str]
) -> AsyncIterator["Observer"]:
    """Yield an observer until the block ends; `reasons` says why NATS last disconnected."""
    async with contextlib.AsyncExitStack() as stack:
        is_opened = target.context and target.url is None
        own = stack.enter_context(reach.restored()) if is_opened else os.environ
        yield Observer(target, progress, reasons, stack, own.get("NATS_CREDS"))


class Process:
    """What a service process reports in its metrics."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        """The pod's name; on this machine, the service's name."""
        self.service = name.removeprefix("muster-").partition("-")[0]
        version = _VERSION.search(text)
        self.version = version[1] if version else ""
        times = {what: float(value) for what, value in _TIMESTAMP.findall(text)}
        self.certificate_ends = times.get("muster_bus_certificate_ends", 0.0)
        self.leads_since = times.get("muster_leader_since")
        """When it began to lead, in Unix seconds; 0 while it does not lead; None if unreported."""


class Observer:
    """Observes one installation; its connections stay open until the stack is closed."""

    def __init__(
        self,
        target: Target,
        progress: Progress,
        reasons: Sequence[str],
        stack: contextlib.AsyncExitStack,
        creds: str | None,
    ) -> None:
        self.cluster: clusters.Cluster | None = None
        self._target = target
        self._progress = progress
        self._reasons = reasons
        self._stack = stack
        self._creds = creds
        self._deadline = asyncio.get_running_loop().time() + target.within_s
        self._check_s = target.within_s * _CHECK_SHARE
        self._request_s = target.within_s * _REQUEST_SHARE
        self._bus: bus.Bus | None = None
        self._less: NotSeen | None = None
        """Why only a reader's rights are available; None if an administrator's are."""
        self.source = ""
        """The URL of health; empty if health did not answer."""
        self.secrets: list[str] = []
        """The credentials in use, which must not be shown."""

    async def observe(self) -> Observations:
        """Make all observations."""
        pods = await self._pods()
        fleet, connected = await asyncio.gather(
            self.look("health", self._health()), self.look("NATS", self._connect())
        )
        link = connected if isinstance(connected, NotSeen) else None
        if isinstance(connected, Broken):
            link = NotSeen("NATS does not answer", is_refused=False)
        whole = link or self._less
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task
            stores = run(
                self._on_bus(
                    "streams",
                    lambda on: doctor_bus.stores(on, timeout_s=self._request_s),
                    whole,
                )
            )
            consumers = run(
                self._on_bus(
                    "consumers",
                    lambda on: doctor_bus.consumers_of_alerts(on, timeout_s=self._request_s),
                    whole,
                )
            )
            leaders = run(self._on_bus("leaders", doctor_bus.leaders, whole))
            receivers = run(self._on_bus("receivers", doctor_bus.receivers, link))
            refused = run(self._on_bus("refused configurations", doctor_bus.refused, link))
            beats = run(self._on_bus("heartbeats", lambda on: doctor_bus.plugins(on, fleet), link))
            served = run(self.look("services", self._services(pods)))
        services = served.result()
        processes = [] if isinstance(services, NotSeen) else services
        return Observations(
            pods=pods,
            bus=connected,
            stores=stores.result(),
            consumers=consumers.result(),
            leaders=_led(leaders.result(), processes),
            health=fleet,
            versions=_versions(beats.result(), services),
            certificates=link or self._certificates(processes),
            receivers=receivers.result(),
            refused=refused.result(),
        )

    def go_on(self) -> None:
        """Restart the time limit, because collecting the bundle takes more time."""
        self._deadline = asyncio.get_running_loop().time() + self._target.within_s

    def now(self) -> datetime:
        """Return the API server's time, or this machine's time if that is unknown."""
        return (self.cluster.api.now() if self.cluster else None) or datetime.now(UTC)

    def _certificates(self, processes: Sequence[Process]) -> Mapping[str, datetime]:
        """Return when NATS' certificates expire, as seen by this command and the services."""
        live = self._bus.link.live_client() if self._bus else None
        ours = connection.certificate_ends(live) if live else 0.0
        seen = {f"NATS (reported by {each.name})": each.certificate_ends for each in processes}
        return {
            name: datetime.fromtimestamp(end, UTC)
            for name, end in {"NATS": ours, **seen}.items()
            if end
        }

    async def look(self, what: str, looking: Coroutine[object, object, Seen]) -> Seen | NotSeen:
        """Return the observation, or the reason for its failure."""
        self._progress(f"checking {what}")
        results: list[Seen] = []

        async def step() -> None:
            results.append(await looking)

        left_s = self._deadline - asyncio.get_running_loop().time()
        limit_s = max(0.001, min(self._check_s, left_s))
        error = await runtime.attempt(step(), limit_s=limit_s)
        if error is None:
            return results[0]
        if isinstance(error, _Unseen):
            return error.seen
        if isinstance(error, TimeoutError):
            return NotSeen(f"no answer within {limit_s:.0f} s")
        is_ours = isinstance(error, (installation.Unreachable, ConnectionError))
        return NotSeen(str(error) if is_ours else f"{type(error).__name__}: {error}")

    async def _pods(self) -> Sequence[installation.Pod] | NotSeen:
        context = self._target.context
        if context is None:
            return NotSeen("no cluster was given; pass --context CONTEXT", is_refused=False)
        return await self.look("pods", self._open(context))

    async def _open(self, context: str) -> Sequence[installation.Pod]:
        from muster.cli import cluster as clusters  # noqa: PLC0415  # the client, only where it is used

        self.cluster = await self._stack.enter_async_context(
            clusters.opened(context=context, namespace=self._target.namespace)
        )
        pods = await self.cluster.pods()
        if not pods:
            raise installation.Unreachable(installation.absent(pods, "", self.cluster.namespace))
        return pods

    async def _health(self) -> health_state.State | Broken:
        address = self._target.health
        if address is None and self._target.context:
            variables = await reach.open_health(self._cluster(), self._stack)
            address = variables["MUSTER_HEALTH_URL"]
        if address is None and (self._target.is_named or not health.running_here()):
            why = "no health service was given; pass --context CONTEXT or --health URL"
            raise _Unseen(NotSeen(why, is_refused=not self._target.is_named))
        try:
            self.source, _, state = await asyncio.to_thread(health.fetch, address)
        except (ConnectionError, ValueError) as error:
            return Broken(str(error))
        return state

    def _cluster(self) -> "clusters.Cluster":
        if self.cluster is None:
            raise installation.Unreachable("the cluster cannot be used")
        return self.cluster

    async def _connect(self) -> Bus | Broken:
        url, rights = self._target.url, ""
        if self._target.context and url is None:
            url, rights = await self._log_on()
        if url is None and self._target.health:
            raise _Unseen(NotSeen("no address of NATS was given; pass --url URL", is_refused=False))
        here = [] if url else health.running_here()
        target = url or (here[0][1] if here else None) or client.DEFAULT_URL
        if password := re.match(r"[a-z]+://[^:@/,]+:([^@/,]*)@", target):
            self.secrets += [password[1], urllib.parse.unquote(password[1])]
        connected = await self._stack.enter_async_context(
            bus.Bus(target, producer="clients/doctor", name="doctor")
        )
        try:
            await client.reach(connected, target, timeout_s=self._request_s)
        except ConnectionError as error:
            if not (self._target.is_named or here):
                raise
            return Broken(": ".join((str(error), *self._reasons)))
        self._bus = connected
        live = await connected.link.client()
        began = time.monotonic()
        try:
            await live.flush(round(self._request_s))
        except connection.LOST:
            return Broken(f"NATS is connected, but has not answered for {self._request_s:g} s")
        took_s = time.monotonic() - began
        if not rights and not await doctor_bus.has_all_rights(connected):
            self._less = NotSeen("not permitted: only an administrator of NATS may read streams")
        server = live.connected_server_version
        return Bus(
            rights=rights or _rights_of(target),
            server=f"nats-server {_version_number(str(server))}",
            round_trip_s=took_s,
        )

    async def _log_on(self) -> tuple[str, str]:
        """Connect to NATS as administrator or else as reader; return the address and the rights."""
        cluster = self._cluster()
        try:
            role = installation.Role.ADMIN
            opened_ = await reach.open_bus(cluster, self._stack, role=role, own=self._creds)
        except installation.Unreachable as error:
            self._less = NotSeen(str(error))
            role = installation.Role.READER
            opened_ = await reach.open_bus(cluster, self._stack, role=role, own=self._creds)
        variables, rights = opened_
        os.environ.update(variables)
        self.secrets.append(variables.get("NATS_CREDS", ""))
        return variables["NATS_URL"], f"{rights}, as {await cluster.user()}"

    async def _on_bus(
        self,
        what: str,
        looking: Callable[[bus.Bus], Coroutine[object, object, Seen]],
        missing: NotSeen | None,
    ) -> Seen | NotSeen:
        if missing is not None or self._bus is None:
            return missing or NotSeen("NATS could not be reached")
        return await self.look(what, looking(self._bus))

    async def _services(self, pods: Sequence[installation.Pod] | NotSeen) -> list[Process]:
        """Return what the services report in their metrics."""
        places = await self._places(pods)
        turns = asyncio.Semaphore(_READS_AT_ONCE)

        async def read(url: str) -> str:
            async with turns:
                return await asyncio.to_thread(_metrics, url)

        texts = await asyncio.gather(*map(read, places.values()))
        return [Process(name, text) for name, text in zip(places, texts, strict=True) if text]

    async def _places(self, pods: Sequence[installation.Pod] | NotSeen) -> Mapping[str, str]:
        """Return the HTTP addresses of services, by the name of the pod or service."""
        if isinstance(pods, NotSeen) or self.cluster is None:
            names = [part.removeprefix("muster-") for part in _SERVICES]
            local = {} if self._target.is_named else {n: health.running_here(n) for n in names}
            places = {name: here[0][0] for name, here in local.items() if here}
            return {"health": self.source, **places} if self.source else places
        asked = [pod for pod in pods if pod.part in _SERVICES and pod.is_ready][:_SERVICES_MAX]
        forwarded = [self.cluster.forwarded(pod, installation.HTTP_PORT) for pod in asked]
        opened_ = await asyncio.gather(*map(self._stack.enter_async_context, forwarded))
        return {pod.name: f"http://{place}" for pod, place in zip(asked, opened_, strict=True)}


class _Unseen(Exception):
    """An observation is not possible; `seen` contains the reason."""

    def __init__(self, seen: NotSeen) -> None:
        super().__init__(seen.why)
        self.seen = seen


def _metrics(url: str) -> str:
    """Return the first part of a process's metrics; empty if it does not answer."""
    with contextlib.suppress(ConnectionError):
        return health_client.read(f"{url}/metrics", _METRICS_BYTES_MAX).decode("utf-8", "replace")
    return ""


def _versions(
    of_plugins: Mapping[str, str] | NotSeen, processes: Sequence[Process] | NotSeen
) -> Mapping[str, str] | NotSeen:
    """Return the version of each process, or why none is known."""
    services = [] if isinstance(processes, NotSeen) else processes
    versions = {each.name: each.version for each in services}
    if not isinstance(of_plugins, NotSeen):
        versions.update(of_plugins)
    if versions:
        return versions
    nothing = NotSeen("no process has answered or sent a heartbeat", is_refused=False)
    return processes if isinstance(processes, NotSeen) else nothing


def _led(
    locks: Mapping[str, Leader | None] | NotSeen, processes: Sequence[Process]
) -> Mapping[str, Leader | None] | NotSeen:
    """Return the leaders and, from their metrics, the time at which each became the leader.

    The labeler uses a Lease instead of a lock in NATS, if it has leader election at all.
    """
    if isinstance(locks, NotSeen):
        return locks
    leaders = dict(locks)
    for process in processes:
        service = process.service
        if process.leads_since is None or service not in {*LOCKS, "labeler"}:
            continue
        leader = leaders.get(service)
        if process.leads_since:
            since = datetime.fromtimestamp(process.leads_since, UTC)
            leaders[service] = Leader(leader.name if leader else process.name, since)
        elif service not in LOCKS:
            leaders.setdefault(service, None)
    return leaders


def _version_number(version: str) -> str:
    number = re.search(r"\d+(\.\d+)+", version)
    return number[0] if number else "of an unknown version"


def _rights_of(url: str) -> str:
    """Return a text with the rights of a connection, without the password."""
    user = re.match(r"[a-z]+://([^:@/,]+)(:[^@/,]*)?@", url)
    if user:
        return f"as {user[1]} (URL)"
    return (
        f"with $NATS_CREDS ({creds})"
        if (creds := os.environ.get("NATS_CREDS"))
        else "without credentials"
    )
