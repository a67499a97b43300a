"""Adapter for the Kubernetes API: leader election by a Lease.

The election works as in client-go (tools/leaderelection). A replica that does not hold the Lease
measures by its own clock how long the Lease has been unchanged, so that clocks need not agree. A
holder that cannot renew the Lease stops acting before another replica can take it over.
"""

import asyncio
import os
import socket
import uuid
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

import msgspec

from muster import leadership
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import objects
from muster.service import logs

_NAMESPACES: Final = "/apis/coordination.k8s.io/v1/namespaces"
_RENEWALS: Final = 3
"""How many times the holder tries to renew the Lease within the Lease's duration."""
_MARGIN: Final = 0.2
"""How long before the Lease expires the holder stops acting, as a share of the duration."""
_RELEASE_S: Final = 1.0


class Lease(leadership.Election):
    """One replica that competes for the Lease.

    Its term is the number of times that the holder has changed. `on_change` is also called when the
    Lease can no longer be read or renewed, and when it can again.
    """

    def __init__(
        self,
        api: kubernetes_api.Api,
        *,
        namespace: str,
        name: str,
        duration_s: int,
        on_change: leadership.OnChange,
    ) -> None:
        identity = f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        super().__init__(identity, on_change)
        self._api = api
        self._path = f"{_NAMESPACES}/{namespace}/leases"
        self._lease = name
        self._duration_s = duration_s
        self._problem = ""
        self._last_version: tuple[str, str | None] | None = None
        self._last_version_at = leadership.now()

    def problem(self) -> str | None:
        """Return why the Lease cannot be read or renewed; None if it can."""
        return self._problem or None

    async def _keep(self) -> None:
        period_s = self._duration_s / _RENEWALS
        while True:
            await self._try(period_s)
            await self._report()
            await asyncio.sleep(period_s if self.term() is not None else period_s / 2)
            await self._report()

    async def _try(self, timeout_s: float) -> None:
        """Acquire or renew the Lease if it is free, expired or held by this replica."""
        asked_at = leadership.now()
        answer = await self._api.request("GET", f"{self._path}/{self._lease}", timeout_s=timeout_s)
        lease = None
        if answer.status != HTTPStatus.NOT_FOUND:
            lease = self._decoded(answer)
            if lease is None:
                self._other_leader = ""
                return
            self._other_leader = "" if lease.holder == self.name else lease.holder
            version = (lease.holder, lease.spec.renew_time if lease.spec else None)
            if version != self._last_version:
                self._last_version, self._last_version_at = version, asked_at
            is_expired = asked_at - self._last_version_at > self._duration_s
            if self._other_leader and not is_expired:
                self._until = float("-inf")
                return
        term = await self._claim(lease, timeout_s)
        if term is not None:
            self._other_leader, self._term = "", term
            self._until = asked_at + self._duration_s * (1 - _MARGIN)

    async def _claim(self, lease: objects.Lease | None, timeout_s: float) -> int | None:
        """Write the Lease with this replica as holder; return the term, None on failure."""
        transitions = (lease.spec.lease_transitions or 0) if lease and lease.spec else 0
        is_renewal = lease is not None and lease.holder == self.name and self.term() is not None
        term = transitions if is_renewal else transitions + 1
        spec = {
            "holderIdentity": self.name,
            "leaseDurationSeconds": self._duration_s,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "leaseTransitions": term,
        }
        answer = await self._write(lease, spec, timeout_s=timeout_s)
        if answer.status == HTTPStatus.CONFLICT:
            # another replica was faster
            return None
        self._note(answer)
        return term if answer.is_ok else None

    async def _resign(self) -> None:
        self._until = float("-inf")
        path = f"{self._path}/{self._lease}"
        lease = self._decoded(await self._api.request("GET", path, timeout_s=_RELEASE_S))
        if lease is not None and lease.holder == self.name:
            # leaseTransitions stays, so that the next term is greater
            spec: dict[str, object] = {
                "holderIdentity": "",
                "leaseDurationSeconds": 1,
                "leaseTransitions": self._term,
            }
            await self._write(lease, spec, timeout_s=_RELEASE_S)

    async def _write(
        self, lease: objects.Lease | None, spec: dict[str, object], *, timeout_s: float
    ) -> kubernetes_api.Answer:
        metadata = {"name": self._lease}
        if lease is not None:
            metadata["resourceVersion"] = lease.metadata.resource_version
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        verb, path = ("PUT", f"{self._path}/{self._lease}") if lease else ("POST", self._path)
        return await self._api.request(verb, path, body=body, timeout_s=timeout_s, attempts=1)

    def _decoded(self, answer: kubernetes_api.Answer) -> objects.Lease | None:
        self._note(answer)
        if not answer.is_ok:
            return None
        try:
            return msgspec.json.decode(answer.body, type=objects.Lease)
        except kubernetes_api.UNREADABLE as error:
            text = f"unreadable: {error}".encode()
            self._note(kubernetes_api.Answer(what=answer.what, status=0, body=text))
            return None

    def _note(self, answer: kubernetes_api.Answer) -> None:
        """Record the problem of a request, if any, and log the first of consecutive problems."""
        if answer.problem and not self._problem:
            logs.logger().warning("lease_unavailable", error=answer.problem)
        self._problem = answer.problem
        self._is_away = bool(answer.problem)
