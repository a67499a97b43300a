"""Pure: the common parts of all events on the bus: names, subjects, node and time.

Subjects have the form `muster.<kind>.<node>.<rest>`. The node is always the third token, so that a
permission for one node is `muster.<kind>.<node>.>`. Node names are DNS subdomains and may contain
dots; in subjects a dot becomes `_`, which no node name may contain, so `node_of` is exact.
"""

import functools
import re
from datetime import datetime
from typing import Annotated, ClassVar, Final

import msgspec

SCHEMA_VERSION: Final = 1
PAGES_MAX: Final = 64
"""The maximum number of messages for one inventory."""
PLUGINS_MAX: Final = 8
"""The maximum number of plugins on one node."""
FLEET: Final = "_fleet"
"""The node of a fact that does not concern a single node; node names start with [a-z0-9]."""

TEST_PLUGIN: Final = "muster-test"
"""Replaces the plugin's name in a test alert, which tests whether alerts reach people."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_NODE_PATTERN: Final = r"^(_fleet|[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)$"
_PLUGIN_PATTERN: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
NodeName = Annotated[str, msgspec.Meta(pattern=_NODE_PATTERN)]
PluginName = Annotated[str, msgspec.Meta(pattern=_PLUGIN_PATTERN)]
# a fleet's heartbeats repeat these names: checking the patterns would double the time msgspec needs
# for a heartbeat (0.22: 2.2 us), so they are checked where the subject is built, with a cache
BeatNode = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _NODE_PATTERN})]
BeatPlugin = Annotated[str, msgspec.Meta(extra_json_schema={"pattern": _PLUGIN_PATTERN})]
DeviceId = Annotated[str, msgspec.Meta(min_length=1, max_length=63)]

_YEARS: Final = (1970, 9000)
_NODE = re.compile(_NODE_PATTERN)
_PLUGIN = re.compile(_PLUGIN_PATTERN)
_TOKEN = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_]{0,127}")


class Struct(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of events and their parts. Unknown fields are ignored: a newer sender may add some.

    These objects cannot be part of a reference cycle, so the garbage collector need not check them.
    """


class Evidence(Struct, frozen=True, kw_only=True):
    """One observation that supports a conclusion: its source, and a description."""

    source: Name
    observed: Text


class Event(Struct, frozen=True, kw_only=True):
    """A fact, in the past tense. `at` is UTC, stamped by the adapter that observed it."""

    TYPE: ClassVar[str]
    SUBJECT: ClassVar[str]
    EARLIER_SUBJECT: ClassVar[str] = ""
    """The subject of earlier versions, if it differs; consumers still read it."""

    node: NodeName
    at: datetime

    def __post_init__(self) -> None:
        """Reject a `node` or `at` that cannot be sent over the bus."""
        node_token(self.node)
        check_time("at", self.at)

    @property
    def subject(self) -> str:
        """The NATS subject that this event is published on."""
        return fill_subject(self.SUBJECT, self)

    @property
    def earlier_subject(self) -> str:
        """The NATS subject on which an earlier version published this event; empty for most."""
        return fill_subject(self.EARLIER_SUBJECT, self)


class PluginEvent(Event, frozen=True, kw_only=True):
    """A fact that a plugin reports about its node."""

    plugin: PluginName


def node_token(node: str) -> str:
    """Return the node name as one subject token: `a.b` becomes `a_b`.

    Raises ValueError for anything that is not a node name.
    """
    if not _NODE.fullmatch(node):
        raise ValueError(f"node: {node!r} is not a Kubernetes node name")
    return node.replace(".", "_")


def node_of(token: str) -> str:
    """Return the node name that a subject token represents; the inverse of `node_token`."""
    return token if token == FLEET else token.replace("_", ".")


@functools.lru_cache(maxsize=64)
def plugin_token(plugin: str) -> str:
    """Return a plugin name as one subject token. Raises ValueError."""
    if not _PLUGIN.fullmatch(plugin):
        raise ValueError(f"plugin: {plugin!r} cannot be part of a subject")
    return plugin


def rpc_subject(node: str, plugin: str, verb: str) -> str:
    """Return the subject on which a plugin answers requests of this verb, such as `probe`."""
    return f"muster.rpc.{node_token(node)}.{plugin}.{verb}"


def check_time(name: str, time: datetime) -> None:
    """Raise ValueError for a time that cannot be sent over the bus."""
    if time.tzinfo is None:
        raise ValueError(f"{name}: the time has no time zone; use UTC")
    if not _YEARS[0] <= time.year < _YEARS[1]:
        # the first and last days of the calendar overflow in another time zone
        raise ValueError(f"{name}: the year {time.year} is out of range")


def fill_subject(template: str, event: Event) -> str:
    """Return the subject of an event. Raises ValueError for a field that cannot be a token."""

    def token(match: re.Match[str]) -> str:
        field = match.group(1)
        value = str(getattr(event, field))
        if field == "node":
            return node_token(value)
        if not _TOKEN.fullmatch(value):
            raise ValueError(f"{field}: {value!r} cannot be part of a subject")
        return value

    return re.sub(r"\{(\w+)\}", token, template)
