"""Pure: decides which containers get /dev/fuse: those whose pod requests it, in allowed namespaces.

| annotation of the pod                            | applies to                          |
|--------------------------------------------------|-------------------------------------|
| `fuse.muster.dev/device`                         | every container                     |
| `fuse.muster.dev/device.container.<container>`   | this container; overrides the first |

The value is "true" or "false". Any other value is an error: if it were treated as "false", the
reason for the missing device would not be visible.
"""

import enum
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

ANNOTATION: Final = "fuse.muster.dev/device"
PATH: Final = "/dev/fuse"
MAJOR: Final = 10
MINOR: Final = 229
MODE: Final = 0o666
"""The mode of the device node.

Path, numbers and mode are constants: as settings, they could expose any device of a node.
"""
_VALUE_SHOWN: Final = 40


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container and its pod; `id` is the runtime's container id."""

    id: str
    namespace: str
    pod: str
    name: str


class Reason(enum.StrEnum):
    """Why a container that requests the device is refused."""

    NAMESPACE = "namespace"
    VALUE = "value"


class Denied(msgspec.Struct, frozen=True, kw_only=True):
    """Why a container must not start; `text` is shown in the events of its pod."""

    reason: Reason
    text: str


class Decision(enum.Enum):
    """The decision on a container that is not denied."""

    DEVICE = enum.auto()
    NOTHING = enum.auto()


def decide(
    container: Container, annotations: Mapping[str, str], *, namespaces: Sequence[str]
) -> Decision | Denied:
    """Return the decision on a container, or why it is denied; `namespaces` are shell patterns."""
    own = f"{ANNOTATION}.container.{container.name}"
    key = own if own in annotations else ANNOTATION
    value = annotations.get(key, "false")
    if value not in {"true", "false"}:
        shown = value[:_VALUE_SHOWN]
        text = f'annotation {key} is {shown!r}; it must be "true" or "false"'
        return Denied(reason=Reason.VALUE, text=text)
    if value == "false":
        return Decision.NOTHING
    if not any(fnmatch.fnmatchcase(container.namespace, pattern) for pattern in namespaces):
        text = (
            f"namespace {container.namespace} may not use {PATH}: it matches none of `namespaces` "
            "in the settings of muster-fuse-nri"
        )
        return Denied(reason=Reason.NAMESPACE, text=text)
    return Decision.DEVICE
