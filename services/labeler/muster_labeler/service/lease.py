"""Adapter: the Kubernetes API: a Lease, so that of several replicas one acts.

As client-go elects (tools/leaderelection): whoever does not hold the Lease counts on its own clock
how long it has not changed, so that clocks need not agree; who holds it stops acting before it can
be taken, also when it cannot be renewed.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final

import msgspec

from muster.kubernetes import api, objects
from muster.service import logs

_API: Final = "/apis/coordination.k8s.io/v1/namespaces"
_SHARE: Final = 3
"""Renewals in the time that the Lease lasts."""
_MARGIN: Final = 0.2
_RELEASE_S: Final = 1.0


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Lease(msgspec.Struct, frozen=True):
    metadata: objects.Metadata
    spec: _Spec | None = None

    @property
    def holder(self) -> str | None:
        """Return who holds it, if anybody does."""
        return self.spec.holder_identity if self.spec else None


class Lease:
    """One replica's try for the Lease; `run` it.

    `changed` is called when it is won, when it is lost, and when it cannot be had or can again.
    """

    def __init__(
        self,
        api: api.Api,
        *,
        namespace: str,
        name: str,
        lasts_s: int,
        changed: Callable[[], None],
    ) -> None:
        self.identity = f"{socket.gethostname()}_{os.getpid()}_{uuid.uuid4().hex[:8]}"
        self.problem = ""
        self._api = api
        self._path = f"{_API}/{namespace}/leases"
        self._name = name
        self._lasts_s = lasts_s
        self._changed = changed
        self._clock = asyncio.get_running_loop().time
        self._until = float("-inf")
        self._seen: tuple[str | None, str | None] = ("", "")
        self._seen_at = self._clock()
        self._told = (False, False)

    @property
    def is_held(self) -> bool:
        """Tell whether we may act right now."""
        return self._clock() < self._until

    async def run(self) -> None:
        """Win it, keep it, for ever; give it up when told to end."""
        period_s = self._lasts_s / _SHARE
        try:
            while True:
                await self._try(period_s)
                self._tell()
                await asyncio.sleep(period_s if self.is_held else period_s / 2)
                self._tell()
        finally:
            if self.is_held:
                await self._release()

    async def _try(self, timeout_s: float) -> None:
        asked_at = self._clock()
        found = await self._read(timeout_s)
        if found is None:
            return
        if isinstance(found, _Lease):
            seen = (found.holder, found.spec.renew_time if found.spec else None)
            if seen != self._seen:
                self._seen, self._seen_at = seen, asked_at
            is_ours = found.holder == self.identity
            is_free = not found.holder
            if not (is_ours or is_free or asked_at - self._seen_at > self._lasts_s):
                self._until = float("-inf")
                return
        if await self._write(found if isinstance(found, _Lease) else None, timeout_s):
            self._until = asked_at + self._lasts_s * (1 - _MARGIN)

    async def _read(self, timeout_s: float) -> _Lease | bool | None:
        """Return the Lease, False if there is none, None if nobody answered."""
        answer = await self._api.ask("GET", f"{self._path}/{self._name}", timeout_s=timeout_s)
        if answer.status == HTTPStatus.NOT_FOUND:
            return False
        return self._decoded(answer)

    async def _write(self, found: _Lease | None, timeout_s: float) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_ours = found is not None and found.holder == self.identity
        transitions = (found.spec.lease_transitions or 0) if found and found.spec else 0
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name}
            | ({"resourceVersion": found.metadata.resource_version} if found else {}),
            "spec": {
                "holderIdentity": self.identity,
                "leaseDurationSeconds": self._lasts_s,
                "renewTime": now,
                "leaseTransitions": transitions + (not is_ours),
            },
        }
        verb, path = ("PUT", f"{self._path}/{self._name}") if found else ("POST", self._path)
        answer = await self._api.ask(verb, path, body=body, timeout_s=timeout_s, attempts=1)
        if answer.status == HTTPStatus.CONFLICT:
            # another replica was faster
            return False
        self._note(answer)
        return answer.is_ok

    async def _release(self) -> None:
        self._until = float("-inf")
        found = await self._read(_RELEASE_S)
        if isinstance(found, _Lease) and found.holder == self.identity:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {
                    "name": self._name,
                    "resourceVersion": found.metadata.resource_version,
                },
                "spec": {"holderIdentity": "", "leaseDurationSeconds": 1},
            }
            path = f"{self._path}/{self._name}"
            await self._api.ask("PUT", path, body=body, timeout_s=_RELEASE_S, attempts=1)

    def _decoded(self, answer: api.Answer) -> _Lease | None:
        self._note(answer)
        if not answer.is_ok:
            return None
        try:
            return msgspec.json.decode(answer.body, type=_Lease)
        except api.UNREADABLE as error:
            text = f"unreadable: {error}".encode()
            self._note(api.Answer(what=answer.what, status=0, body=text))
            return None

    def _note(self, answer: api.Answer) -> None:
        """Say once why the Lease cannot be had."""
        if answer.problem and not self.problem:
            logs.logger().warning("lease_away", error=answer.problem)
        self.problem = answer.problem

    def _tell(self) -> None:
        was, self._told = self._told, (self.is_held, bool(self.problem))
        if was[0] != self._told[0]:
            logs.logger().info("leads" if self._told[0] else "follows", identity=self.identity)
        if was != self._told:
            self._changed()
