"""Pure: tracks how many devices of each resource the kubelet should list: configured or learned.

A count is learned when the kubelet has listed it for a while, or when the kubelet's checkpoint has
the same count. A learned count never decreases, because a plugin that offers fewer devices after a
restart has failed. Learned counts, and the resource of each socket, are saved to a file, so that
they survive restarts of the plugin, the kubelet, the node and this agent.

For a resource that the kubelet has never listed, the count in its checkpoint is expected. The
kubelet may never list this resource, because it leaves out devices whose topology has no NUMA node
(1.37.2, pkg/kubelet/cm/container_manager.go), such as devices of Intel's plugin whose NUMA node is
unknown.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec

from muster_plugin.watch import naming

LEARNING_S: Final = 30.0
_ENTRIES_MAX: Final = 256
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Resource = Annotated[str, msgspec.Meta(max_length=253, pattern=rf"^{naming.RESOURCE.pattern}\Z")]
_Most = msgspec.Meta(max_length=_ENTRIES_MAX)
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the saved file: expected counts, and the resources of sockets."""

    version: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    expected: Annotated[dict[_Resource, _Count], _Most] = {}
    resources: Annotated[dict[_Name, _Resource], _Most] = {}
    """The resource of each socket, by the socket's stem (`naming.stem`)."""


def encode(memory: Memory) -> bytes:
    """Encode the memory for the file."""
    return msgspec.json.encode(memory, order="sorted")


def decode(text: bytes) -> Memory:
    """Decode the content of the file. Raises ValueError."""
    try:
        return msgspec.json.decode(text, type=Memory)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


class Expectations:
    """How many devices of each resource are expected."""

    def __init__(self, configured: Mapping[str, int], learned: Mapping[str, int]) -> None:
        self._configured = configured
        self.learned = {**learned}
        self._listed: dict[str, tuple[int, float]] = {}
        self._had: dict[str, int] = {}
        self._registered: dict[str, int] = {}

    def expected(self, resource: str) -> int | None:
        """Return how many devices should be listed; None if that is unknown."""
        known = self._configured.get(resource, self.learned.get(resource))
        return self._registered.get(resource) if known is None else known

    def is_listable(self, resource: str) -> bool:
        """Return whether the kubelet would list the devices of a resource; True if unknown."""
        return resource in self.learned or resource not in self._registered

    def had(self, resource: str) -> int:
        """Return the last listed count above 0, since this process started; 0 if there was none."""
        return self._had.get(resource, 0)

    @property
    def resources(self) -> frozenset[str]:
        """The resources with devices that are expected, or were listed since the start."""
        names = {*self._configured, *self.learned, *self._had, *self._registered}
        return frozenset(filter(self.expects, names))

    def expects(self, resource: str) -> bool:
        """Return whether a device of a resource is expected, or was listed since the start."""
        return bool(self.expected(resource) or self.had(resource))

    def record_listed(self, resource: str, count: int, now: float) -> bool:
        """Record the count that the kubelet lists; return whether it was learned."""
        if not count:
            self._listed.pop(resource, None)
            return False
        is_confirmed = self._registered.pop(resource, None) == count
        if len(self._had) < _ENTRIES_MAX or resource in self._had:
            self._had[resource] = count
        before, since = self._listed.get(resource, (0, now))
        if count != before:
            since = now
        if resource in self._had:
            self._listed[resource] = count, since
        is_certain = is_confirmed or now - since >= LEARNING_S
        return is_certain and self._learn(resource, count)

    def record_registered(self, resource: str, count: int) -> bool:
        """Record the count in the kubelet's checkpoint; return whether it was learned."""
        listed, _ = self._listed.get(resource, (0, 0.0))
        if count and count == listed:
            return self._learn(resource, count)
        if count and not self.had(resource) and len(self._registered) < _ENTRIES_MAX:
            self._registered[resource] = count
        return False

    def forget(self, resource: str) -> bool:
        """Remove a resource that is gone from the node; return whether its count was learned."""
        self._listed.pop(resource, None)
        self._had.pop(resource, None)
        self._registered.pop(resource, None)
        return self.learned.pop(resource, None) is not None

    def _learn(self, resource: str, count: int) -> bool:
        is_more = count > self.learned.get(resource, 0)
        if not is_more or (resource not in self.learned and len(self.learned) >= _ENTRIES_MAX):
            return False
        self.learned[resource] = count
        return True
