"""Adapter: the Kubernetes API: leader election by a Lease.

As client-go elects (tools/leaderelection): a replica that does not hold the Lease measures on its
own clock for how long it has not changed, so that clocks need not agree; the holder stops acting
before the Lease can be taken over, also when it cannot renew it.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, Self

import msgspec

from muster import leadership
from muster.kubernetes import api as kubernetes_api
from muster.kubernetes import objects
from muster.service import logs

_NAMESPACES: Final = "/apis/coordination.k8s.io/v1/namespaces"
_RENEWALS: Final = 3
"""Per duration of the Lease."""
_MARGIN: Final = 0.2
"""The share of its duration that we give up before its end."""
_RELEASE_S: Final = 1.0


class Lease:
    """One replica that wants the Lease; a `leadership.Election`.

    Its term is the number of times that the Lease has changed hands. `on_change` is also called
    when the Lease can no longer be read or renewed, and when it can be again.
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
        self.identity = f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        self.current = leadership.Leadership(leader="", term=None)
        """The last reported state; only `term` says whether we may still act."""
        self._api = api
        self._path = f"{_NAMESPACES}/{namespace}/leases"
        self._name = name
        self._duration_s = duration_s
        self._on_change = on_change
        self._term = 0
        self._until = float("-inf")
        self._leader = ""
        self._problem = ""
        self._was_away = False
        self._last_version: tuple[str, str | None] | None = None
        self._last_version_at = leadership.now()
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start trying to take the Lease."""
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release the Lease, so that the next replica can take it at once."""
        assert self._task is not None, "left without being entered"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self.term() is not None:
            await self._release()
        await self._report()

    def term(self) -> int | None:
        """Return the term in which we may act right now; None if we may not."""
        return self._term if leadership.now() < self._until else None

    def is_term(self, term: int) -> bool:
        """Return whether we may act now, and have held the Lease in this term without a break."""
        return self.term() == term

    def problem(self) -> str | None:
        """Return why the Lease cannot be read or renewed; None if it can."""
        return self._problem or None

    async def terms(self) -> AsyncIterator[int | None]:
        """Yield our present term, None if we do not hold the Lease, then every change."""
        while True:
            term = self.current.term
            yield term
            async with self._changed:
                while self.current.term == term:
                    await self._changed.wait()

    async def failed(self) -> None:
        """Raise the error that ended our renewals, as nobody would renew the Lease any more."""
        assert self._task is not None, "awaited before being entered"
        await asyncio.wait([self._task])
        self._task.result()

    async def _keep(self) -> None:
        period_s = self._duration_s / _RENEWALS
        while True:
            await self._try(period_s)
            await self._report()
            await asyncio.sleep(period_s if self.term() is not None else period_s / 2)
            await self._report()

    async def _try(self, timeout_s: float) -> None:
        """Take over or renew the Lease if it is free, expired or ours."""
        asked_at = leadership.now()
        answer = await self._api.request("GET", f"{self._path}/{self._name}", timeout_s=timeout_s)
        lease = None
        if answer.status != HTTPStatus.NOT_FOUND:
            lease = self._decoded(answer)
            if lease is None:
                self._leader = ""
                return
            self._leader = lease.holder
            version = (lease.holder, lease.spec.renew_time if lease.spec else None)
            if version != self._last_version:
                self._last_version, self._last_version_at = version, asked_at
            is_expired = asked_at - self._last_version_at > self._duration_s
            if lease.holder not in {"", self.identity} and not is_expired:
                self._until = float("-inf")
                return
        term = await self._claim(lease, timeout_s)
        if term is not None:
            self._leader, self._term = self.identity, term
            self._until = asked_at + self._duration_s * (1 - _MARGIN)

    async def _claim(self, lease: objects.Lease | None, timeout_s: float) -> int | None:
        """Write ourselves as holder of the Lease just read; return our term, None on failure."""
        transitions = (lease.spec.lease_transitions or 0) if lease and lease.spec else 0
        is_renewal = lease is not None and lease.holder == self.identity and self.term() is not None
        term = transitions if is_renewal else transitions + 1
        spec = {
            "holderIdentity": self.identity,
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

    async def _release(self) -> None:
        self._until, self._leader = float("-inf"), ""
        path = f"{self._path}/{self._name}"
        lease = self._decoded(await self._api.request("GET", path, timeout_s=_RELEASE_S))
        if lease is not None and lease.holder == self.identity:
            # the transitions stay, so that the next term is a greater one
            spec: dict[str, object] = {
                "holderIdentity": "",
                "leaseDurationSeconds": 1,
                "leaseTransitions": self._term,
            }
            await self._write(lease, spec, timeout_s=_RELEASE_S)

    async def _write(
        self, lease: objects.Lease | None, spec: dict[str, object], *, timeout_s: float
    ) -> kubernetes_api.Answer:
        metadata = {"name": self._name}
        if lease is not None:
            metadata["resourceVersion"] = lease.metadata.resource_version
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }
        verb, path = ("PUT", f"{self._path}/{self._name}") if lease else ("POST", self._path)
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
        """Log once when the Lease can no longer be read or renewed."""
        if answer.problem and not self._problem:
            logs.logger().warning("lease_unavailable", error=answer.problem)
        self._problem = answer.problem

    async def _report(self) -> None:
        was, term = self.current, self.term()
        # without a term it is not ours any more, whatever was last read
        others = "" if self._leader == self.identity else self._leader
        now = leadership.Leadership(leader=others if term is None else self.identity, term=term)
        is_away = bool(self._problem)
        if now == was and is_away == self._was_away:
            return
        if (now.term is None) != (was.term is None):
            event = "leadership_lost" if now.term is None else "leadership_gained"
            logs.logger().info(event, identity=self.identity)
        self.current, self._was_away = now, is_away
        async with self._changed:
            self._changed.notify_all()
        self._on_change(was, now)
