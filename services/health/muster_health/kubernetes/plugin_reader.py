"""Adapter: reads from the Kubernetes API whether plugins work, while this replica leads.

A round reads nodes, pods, events and the objects of Dynamic Resource Allocation, page by page.
Kinds that may not be read or are not served are left out, except nodes and pods; after any other
failure the round is discarded.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Final, TypeVar

import msgspec

from muster.kubernetes import api, known_plugins, objects, plugin_facts, plugin_objects
from muster.service import logs
from muster_health.kubernetes import observed_plugins
from muster_health.model import signals

_ROUND_S: Final = 50.0
_OBJECTS_MAX: Final = 20_000
"""The maximum number of kept objects of one kind; a round with more is discarded."""
_DRA: Final = "/apis/resource.k8s.io/v1"

Shape = TypeVar("Shape", bound=objects.HasMetadata)


class _Unread(Exception):
    """A round could not be read; the message gives the reason."""


class PluginReader:
    """Reads all known plugins every `period_s` while `is_leading`; passes each result to `put`."""

    def __init__(
        self,
        api: api.Api,
        put: Callable[[signals.ClusterObserved], Awaitable[None]],
        *,
        is_leading: Callable[[], bool],
        period_s: float = 60.0,
        more: tuple[known_plugins.KnownPlugin, ...] = (),
    ) -> None:
        self.problems: dict[str, str] = {}
        """Missing permissions, and why the last round was discarded."""
        self._api = api
        self._put = put
        self._is_leading = is_leading
        self._period_s = period_s
        self._more = more
        self._observed = observed_plugins.ObservedPlugins()

    async def run(self) -> None:
        """Read rounds forever, while this replica leads."""
        while True:
            if self._is_leading():
                await self.read()
            else:
                self._observed.forget()
            await asyncio.sleep(self._period_s)

    async def read(self) -> None:
        """Read one round, and pass on its observations if this replica still leads."""
        before, self.problems = self.problems, {}
        try:
            async with asyncio.timeout(_ROUND_S):
                view = await self._view()
        except (_Unread, TimeoutError) as error:
            self.problems["plugins"] = str(error) or f"not read within {_ROUND_S:.0f} s"
        else:
            # tens of thousands of objects would block the event loop for too long
            facts = await asyncio.to_thread(plugin_facts.gather, view)
            observations = await asyncio.to_thread(self._observed.observe, facts)
            for observation in observations if self._is_leading() else ():
                await self._put(observation)
        if self.problems != before:
            log = logs.logger()
            if self.problems:
                log.warning("plugin_objects_unreadable", problems=self.problems)
            else:
                log.info("plugin_objects_readable")

    async def _view(self) -> plugin_facts.View:
        pods = await self._all("/api/v1/pods", plugin_objects.Pod, self._trimmed_if_relevant)
        query = {"fieldSelector": "reason=FailedPrepareDynamicResources"}
        events = await self._all("/api/v1/events", plugin_objects.Event, query=query)
        nodes = await self._all("/api/v1/nodes", objects.Node, plugin_facts.trimmed_node)
        now = self._api.now()
        if nodes is None or pods is None or now is None:
            raise _Unread("nodes or pods cannot be listed")
        claims = await self._all(f"{_DRA}/resourceclaims", plugin_objects.ResourceClaim)
        classes = await self._all(f"{_DRA}/deviceclasses", plugin_objects.DeviceClass)
        return plugin_facts.View(
            now=now,
            nodes=nodes,
            pods=pods,
            daemon_sets=await self._all("/apis/apps/v1/daemonsets", plugin_objects.DaemonSet),
            slices=await self._all(f"{_DRA}/resourceslices", plugin_objects.ResourceSlice),
            claims=claims or (),
            classes=classes or (),
            events=events or (),
            more=self._more,
        )

    def _trimmed_if_relevant(self, pod: plugin_objects.Pod) -> plugin_objects.Pod | None:
        is_relevant = plugin_facts.is_relevant(pod, self._more)
        return plugin_facts.trimmed_pod(pod) if is_relevant else None

    async def _all(
        self,
        path: str,
        shape: type[Shape],
        keep: Callable[[Shape], Shape | None] = lambda entry: entry,
        *,
        query: Mapping[str, str] | None = None,
    ) -> list[Shape] | None:
        """Return what `keep` returns for the objects at `path`, except None. Raises _Unread.

        Unreadable objects are skipped. Return None if we may not list the objects, or if the API
        does not serve them.
        """
        decoder = msgspec.json.Decoder(shape)
        kept: list[Shape] = []
        try:
            pages = self._api.pages(path, query=query, timeout_s=_ROUND_S)
            async with contextlib.aclosing(pages):
                async for page in pages:
                    for item in page.items:
                        with contextlib.suppress(*api.UNREADABLE):
                            if (entry := keep(decoder.decode(item))) is not None:
                                kept.append(entry)
                    if len(kept) > _OBJECTS_MAX:
                        raise _Unread(f"{path}: more than {_OBJECTS_MAX} objects")
        except api.Refused as error:
            if error.answer.is_forbidden:
                self.problems[path] = error.answer.problem
            elif error.answer.status != HTTPStatus.NOT_FOUND:
                raise _Unread(error.answer.problem) from None
            return None
        return kept
