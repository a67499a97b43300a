"""Adapter: the Kubernetes API: writes Events, and asks who owns a pod.

Two kinds of requests need no client library, which would cost more memory than everything else
here. The token is read anew for each: Kubernetes replaces it within the hour.
"""

import asyncio
import dataclasses
import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from muster_notifier import addresses, answers, posting, regarding
from muster_notifier import notification as notifications

_CONFLICT: Final = 409
_NOT_FOUND: Final = 404
_OK: Final = 200
_TOKEN_BYTES_MAX: Final = 64 * 1024


class NoCluster(Exception):
    """There is no Kubernetes API; the text says what was tried."""


class Unknown(Exception):
    """Kubernetes did not say; the text says why."""


class _Metadata(msgspec.Struct, frozen=True):
    uid: str = ""
    annotations: dict[str, str] | None = None


class _Object(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()


class Cluster:
    """One cluster's API."""

    def __init__(self, settings: addresses.Kubernetes) -> None:
        """Raise NoCluster if there is none."""
        url, tls = settings.url, None
        if url is None:
            host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
            port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise NoCluster("kubernetes: this is no pod, and kubernetes.url is not set")
            url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        if url.startswith("https://") and Path(settings.ca_file).exists():
            try:
                tls = ssl.create_default_context(cafile=settings.ca_file)
            except OSError as error:
                text = f"kubernetes: {settings.ca_file}: {error.strerror or error}"
                raise NoCluster(text) from None
        # whoever runs muster chose this address: it lies within our own network
        self._site = posting.Site(
            url, timeout_s=settings.timeout_s, reach=addresses.Reach.LOOPBACK, tls=tls
        )
        self._token = Path(settings.token_file)

    async def ask(
        self, method: str, path: str, body: object = None
    ) -> posting.Response | answers.Answer:
        """Send one request; an Answer says why there is no response."""
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        token = await asyncio.to_thread(self._read_token)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        encoded = b"" if body is None else msgspec.json.encode(body)
        return await self._site.ask(method, below=path, headers=headers, body=encoded)

    async def annotations(self, path: str) -> Mapping[str, str]:
        """Return an object's annotations; none if it is gone. Raises Unknown."""
        return (await self._metadata(path)).annotations or {}

    async def uid(self, path: str) -> str:
        """Return an object's uid; empty if it is gone, or cannot be known."""
        try:
            return (await self._metadata(path)).uid
        except Unknown:
            return ""

    async def _metadata(self, path: str) -> _Metadata:
        answer = await self.ask("GET", path)
        if isinstance(answer, answers.Answer):
            raise Unknown(answer.detail)
        if answer.status == _NOT_FOUND:
            return _Metadata()
        if answer.status != _OK:
            raise Unknown(f"{path}: HTTP {answer.status}")
        try:
            found = msgspec.json.decode(answer.body, type=_Object)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise Unknown(f"{path}: the answer is no object of Kubernetes") from None
        return found.metadata

    def _read_token(self) -> str:
        try:
            with self._token.open("rb") as opened:
                return opened.read(_TOKEN_BYTES_MAX).decode("ascii", "replace").strip()
        except OSError:
            return ""


class Events:
    """The receiver that is Kubernetes Events."""

    def __init__(
        self, cluster: Cluster, settings: addresses.KubernetesEvents, *, pace_s: float
    ) -> None:
        """Wait `pace_s` between requests."""
        self._pace_s = pace_s
        self._cluster = cluster
        self._settings = settings

    async def send(
        self, notification: notifications.Notification, _: Mapping[str, str]
    ) -> answers.Answer:
        """Write the Events; what is there already, or whose namespace is gone, is done."""
        found = regarding.events(
            notification, namespace=self._settings.namespace, pods=self._settings.pods
        )
        return await self._write(found)

    async def _write(self, events: Sequence[regarding.Event]) -> answers.Answer:
        for number, event in enumerate(events):
            if number:
                await asyncio.sleep(self._pace_s)
            path = f"/apis/events.k8s.io/v1/namespaces/{event.namespace}/events"
            body = event.body
            if event.pod:
                # kubectl describe pod looks for events with the pod's uid
                where = f"/api/v1/namespaces/{event.namespace}/pods/{event.pod}"
                body = regarding.with_uid(body, await self._cluster.uid(where))
            answer = await self._cluster.ask("POST", path, body)
            if isinstance(answer, answers.Answer):
                return dataclasses.replace(answer, requests=number + 1)
            gone = answer.status == _NOT_FOUND and event.namespace != self._settings.namespace
            if answer.status == _CONFLICT or gone:
                continue
            meaning = answers.of_status(answer.status, answer.headers)
            if meaning.kind is not answers.Kind.TAKEN:
                return dataclasses.replace(meaning, requests=number + 1)
        count = len(events)
        detail = f"{count} events"
        return answers.Answer(outcome=answers.Outcome.TAKEN, detail=detail, requests=max(1, count))
