"""Adapter for the Kubernetes API: writes Events, and reads the receivers of owners of workloads.

The name of an Event is derived from the notification, so a repeat creates no second Event.
Kubernetes deletes Events after about an hour: they are a view, not a record.

An annotation of the pod, or else of its namespace, names the owners' receivers; it is cached for a
minute. Other receivers do not wait for this look-up. While Kubernetes does not answer, the look-up
is retried, so owners are notified late rather than never.

These two kinds of requests do not need a client library, which would use more memory than the rest
of the notifier. The token is read again for each request, because Kubernetes replaces it hourly.
"""

import asyncio
import dataclasses
import os
import re
import ssl
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import prometheus_client

from muster import codec, http, pacing, vocabulary, wording
from muster.service import logs
from muster_notifier.config import receiver_settings
from muster_notifier.receivers import console_links, endpoint, headline, message, results
from muster_notifier.routing import alert_index, notifications

CONTROLLER: Final = "muster.dev/notifier"

_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_POD: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_ALERTS_MAX: Final = 20
_PODS_SHOWN_MAX: Final = 20
_NOTE_MAX: Final = 1000
"""The maximum bytes of an Event's note; Kubernetes accepts 1,024 (apis/events/v1/types.go)."""

Json = dict[str, object]
_CONFLICT: Final = 409
_NOT_FOUND: Final = 404
_OK: Final = 200
_TOKEN_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    """One Event, its namespace, and the pod that it concerns, if any."""

    namespace: str
    body: Json
    pod: str = ""


def events(
    notification: notifications.Notification,
    settings: receiver_settings.KubernetesEvents,
    *,
    console_url: str = "",
) -> list[Event]:
    """Return Events about the node and, if enabled, the first pods of each of the first alerts."""
    made: list[Event] = []
    alerts = (*notification.firing, *notification.notified_resolved)
    for alert in alerts[:_ALERTS_MAX]:
        for where, about in _about(alert, namespace=settings.namespace, pods=settings.pods):
            link = console_links.of_alert(console_url, alert)
            body = _event(notification, alert, where, about, len(made), link)
            pod = str(about["name"]) if about["kind"] == "Pod" else ""
            made.append(Event(where, body, pod))
    return made


def with_uid(body: Json, uid: str) -> Json:
    """Return an Event with the uid of its object, if known."""
    about = body["regarding"]
    assert isinstance(about, dict), "this module has built the Event"
    return {**body, "regarding": {**about, "uid": uid}} if uid else body


def pod_of(text: str) -> tuple[str, str] | None:
    """Return namespace and name of a pod; None if invalid, because names from NATS are untrusted.

    Only a valid name may become part of a path.
    """
    namespace, _, name = text.partition("/")
    if _NAMESPACE.fullmatch(namespace) and _POD.fullmatch(name):
        return namespace, name
    return None


def _about(
    alert: vocabulary.AlertChanged, *, namespace: str, pods: bool
) -> Iterator[tuple[str, Json]]:
    if alert.node != vocabulary.FLEET:
        # in Events, the kubelet and `kubectl describe node` use a node's name as its uid
        yield namespace, {"kind": "Node", "name": alert.node, "uid": alert.node, "apiVersion": "v1"}
    for pod in alert.pods[:_PODS_SHOWN_MAX] if pods else ():
        name_parts = pod_of(pod)
        if name_parts is not None:
            where, name = name_parts
            yield where, {"kind": "Pod", "name": name, "namespace": where, "apiVersion": "v1"}


def _event(
    notification: notifications.Notification,
    alert: vocabulary.AlertChanged,
    namespace: str,
    about: Json,
    number: int,
    link: str,
) -> Json:
    fires = alert.state is vocabulary.AlertState.FIRING
    at = notification.at.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    word = "".join(part.capitalize() for part in alert.kind.split("_"))
    test = message.TEST if headline.is_test(notification) else ""
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"muster.{notification.id}.{number}", "namespace": namespace},
        "eventTime": at,
        "reportingController": CONTROLLER,
        "reportingInstance": "muster-notifier",
        "action": "Notify",
        "reason": word if fires else f"{word}Resolved",
        "regarding": about,
        "note": _note(f"{test}{alert.summary}", alert, f"; console: {link}" if link else ""),
        "type": "Warning" if fires and alert.severity != vocabulary.Severity.INFO else "Normal",
    }


def _note(head: str, alert: vocabulary.AlertChanged, end: str) -> str:
    parts = [head]
    parts += [f"{evidence.source}: {evidence.observed}" for evidence in alert.evidence]
    parts += [alert.advice or alert.runbook]
    bytes_max = _NOTE_MAX - len(end.encode())
    text = headline.line("; ".join(part for part in parts if part), bytes_max)
    # the limit is in bytes, but `cut` counts characters
    while len(text.encode()) > bytes_max:
        text = headline.cut(text, len(text) * 9 // 10)
    return text + end


class NoKubernetes(Exception):
    """The Kubernetes API is not configured, or its CA file is unusable; the message has details."""


class LookupFailed(Exception):
    """Kubernetes did not give a usable answer; the message gives the reason."""


class _Metadata(msgspec.Struct, frozen=True):
    uid: str = ""
    annotations: dict[str, str] | None = None


class _Object(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class KubernetesApi:
    """A client of one cluster's Kubernetes API."""

    def __init__(self, settings: receiver_settings.Kubernetes) -> None:
        """Raise NoKubernetes if the API is not configured, or if its CA file is unusable."""
        url, tls = settings.url, None
        if url is None:
            host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
            port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise NoKubernetes("kubernetes: not in a pod, and kubernetes.url is not set")
            url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        if url.startswith("https://") and Path(settings.ca_file).exists():
            try:
                tls = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:
                text = f"kubernetes: {settings.ca_file}: {error.strerror or error}"
                raise NoKubernetes(text) from None
        # the operator has set this address, which is in our own network
        self._endpoint = endpoint.Endpoint(
            url, timeout_s=settings.timeout_s, reach=receiver_settings.Reach.LOOPBACK, tls=tls
        )
        self._token = Path(settings.token_file)

    async def request(
        self, method: str, path: str, body: object = None
    ) -> http.Response | results.Result:
        """Send one request; return the response, or a Result with the reason if there is none."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        token = await asyncio.to_thread(self._read_token)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        encoded = b"" if body is None else msgspec.json.encode(body)
        return await self._endpoint.request(method, below=path, headers=headers, body=encoded)

    async def annotations(self, path: str) -> Mapping[str, str]:
        """Return an object's annotations; empty if it has none or is gone. Raises LookupFailed."""
        return (await self._metadata(path)).annotations or {}

    async def uid(self, path: str) -> str:
        """Return an object's uid; empty if it no longer exists or cannot be read."""
        try:
            return (await self._metadata(path)).uid
        except LookupFailed:
            return ""

    async def _metadata(self, path: str) -> _Metadata:
        answer = await self.request("GET", path)
        if isinstance(answer, results.Result):
            raise LookupFailed(answer.detail)
        if answer.status == _NOT_FOUND:
            return _Metadata()
        if answer.status != _OK:
            raise LookupFailed(f"{path}: HTTP {answer.status}")
        try:
            metadata_owner = msgspec.json.decode(answer.body, type=_Object)
        except codec.UNREADABLE:
            raise LookupFailed(f"{path}: the answer is not a Kubernetes object") from None
        return metadata_owner.metadata

    def _read_token(self) -> str:
        try:
            with self._token.open("rb") as opened:
                return opened.read(_TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
        except OSError:
            return ""


class KubernetesEvents:
    """The receiver that writes Kubernetes Events."""

    def __init__(
        self,
        cluster: KubernetesApi,
        settings: receiver_settings.KubernetesEvents,
        *,
        pace_s: float,
        console_url: str,
    ) -> None:
        """Create a receiver that waits `pace_s` seconds between Events."""
        self._pace_s = pace_s
        self._console_url = console_url
        self._api = cluster
        self._settings = settings

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> results.Result:
        """Write Events; skip one that already exists, or whose pod's namespace no longer exists."""
        made = events(notification, self._settings, console_url=self._console_url)
        return await self._write(made)

    async def _write(self, events: Sequence[Event]) -> results.Result:
        for number, event in enumerate(events):
            if number:
                await asyncio.sleep(self._pace_s)
            path = f"/apis/events.k8s.io/v1/namespaces/{event.namespace}/events"
            body = event.body
            if event.pod:
                # kubectl describe pod looks for events with the pod's uid
                where = f"/api/v1/namespaces/{event.namespace}/pods/{event.pod}"
                body = with_uid(body, await self._api.uid(where))
            answer = await self._api.request("POST", path, body)
            if isinstance(answer, results.Result):
                return dataclasses.replace(answer, requests=number + 1)
            gone = answer.status == _NOT_FOUND and event.namespace != self._settings.namespace
            if answer.status == _CONFLICT or gone:
                continue
            meaning = results.of_status(answer.status, answer.headers)
            if meaning.kind is not results.Kind.ACCEPTED:
                return dataclasses.replace(meaning, requests=number + 1)
        detail = wording.counted(len(events), "event")
        return results.Result(results.Outcome.ACCEPTED, detail, requests=max(1, len(events)))


_CACHED_S: Final = 60.0
_CACHE_MAX: Final = 10_000
_PODS_MAX: Final = 1_000
_PARALLEL_MAX: Final = 8
_RETRY_MAX_S: Final = 60.0

_PENDING = prometheus_client.Gauge(
    "muster_notifier_pending_owner_lookups", "Alerts whose pods' owners are not known yet."
)


class Owners:
    """Looks up the owners of alerts' pods in the background; passes the results to `report`."""

    def __init__(
        self,
        api: KubernetesApi,
        *,
        annotation: str,
        receivers: Collection[str],
        report: Callable[[alert_index.OwnedAlert], Awaitable[None]],
        retry_s: float = 1.0,
    ) -> None:
        """`retry_s` is half the delay before the first retry when Kubernetes does not answer."""
        self._api = api
        self._annotation = annotation
        self._receivers = frozenset(receivers)
        self._report = report
        self._backoff = pacing.Backoff(first_s=2 * retry_s, max_s=_RETRY_MAX_S)
        self._cache: OrderedDict[str, tuple[float, str | None]] = OrderedDict()
        self._unknown_receivers: set[str] = set()
        # the newest event of each alert
        self._pending: dict[str, codec.CloudEvent] = {}
        self._has_pending = asyncio.Event()
        self._limit = asyncio.Semaphore(_PARALLEL_MAX)
        _PENDING.set_function(lambda: len(self._pending))

    def look_up(self, event: codec.CloudEvent) -> None:
        """Enqueue a look-up of the owners of an alert's pods; drop it if the alert is resolved."""
        alert = event.data
        assert isinstance(alert, vocabulary.AlertChanged), "only alerts have pods"
        self._pending.pop(alert.fingerprint, None)
        if alert.pods and alert.state is vocabulary.AlertState.FIRING:
            self._pending[alert.fingerprint] = event
            self._has_pending.set()

    async def run(self) -> None:
        """Run all pending look-ups, forever."""
        failures = 0
        while True:
            await self._has_pending.wait()
            if not self._pending:
                self._has_pending.clear()
                continue
            name, event = next(iter(self._pending.items()))
            assert isinstance(event.data, vocabulary.AlertChanged), "only alerts have pods"
            try:
                owners = await self.owners_of(event.data.pods)
            except LookupFailed as error:
                failures += 1
                if failures == 1:
                    logs.logger().warning("owner_lookup_failing", error=str(error))
                await asyncio.sleep(self._backoff.delay_s(failures))
                continue
            if failures:
                logs.logger().info("owner_lookup_recovered", attempts=failures + 1)
            failures = 0
            if self._pending.get(name) is event:
                del self._pending[name]
                await self._report(alert_index.OwnedAlert(event, owners))

    async def owners_of(self, pods: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return the receivers named by the pods' owners, each with these owners' pods.

        Raises LookupFailed.
        """
        names = list(dict.fromkeys(pods))
        if len(names) > _PODS_MAX:
            logs.logger().warning("owner_lookup_truncated", pods=len(names), looked_up=_PODS_MAX)
            del names[_PODS_MAX:]
        texts = await asyncio.gather(
            *(self._named_by(pod) for pod in names), return_exceptions=True
        )
        named: dict[str, tuple[str, ...]] = {}
        for pod, text in zip(names, texts, strict=True):
            if isinstance(text, BaseException):
                raise text
            for name in sorted({part.strip() for part in text.split(",")} - {""}):
                if name in self._receivers:
                    named[name] = (*named.get(name, ()), pod)
                elif (
                    name not in self._unknown_receivers
                    and len(self._unknown_receivers) < _CACHE_MAX
                ):
                    self._unknown_receivers.add(name)
                    logs.logger().warning(
                        "owner_names_unknown_receiver", pod=pod, receiver=name[:100]
                    )
        return named

    async def _named_by(self, pod: str) -> str:
        parts = pod_of(pod)
        if parts is None:
            return ""
        namespace, name = parts
        async with self._limit:
            own = await self._annotation_of(f"/api/v1/namespaces/{namespace}/pods/{name}")
            if own is not None:
                return own
            return await self._annotation_of(f"/api/v1/namespaces/{namespace}") or ""

    async def _annotation_of(self, path: str) -> str | None:
        now = asyncio.get_running_loop().time()
        at, value = self._cache.get(path, (-_CACHED_S, None))
        if now - at < _CACHED_S:
            return value
        value = (await self._api.annotations(path)).get(self._annotation)
        self._cache[path] = (now, value)
        self._cache.move_to_end(path)
        if len(self._cache) > _CACHE_MAX:
            self._cache.popitem(last=False)
        return value
