"""Pure: the settings for watching plugins that muster does not run.

They are read when the process starts.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec

from muster import vocabulary
from muster_plugin.model import advertised, errors

_DEVICES_MAX: Final = 1_000_000
_PATTERN_MAX: Final = 253
Expected = Annotated[int, msgspec.Meta(ge=0, le=_DEVICES_MAX)]
Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=_PATTERN_MAX)]


class Watch(errors.Checked, frozen=True, kw_only=True):
    """Whether and how to watch the node's plugins that muster does not run.

    `expect` is how many devices of a resource the kubelet should list, instead of the learned
    number; 0 means that the resource may have no devices. `ignore` lists shell patterns for
    resources, drivers and sockets.
    """

    enabled: bool = False
    expect: Annotated[Mapping[vocabulary.Name, Expected], msgspec.Meta(max_length=256)] = (
        msgspec.field(default_factory=dict)
    )
    ignore: Annotated[tuple[Pattern, ...], msgspec.Meta(max_length=64)] = ()

    def ignores(self, name: str) -> bool:
        """Return whether a resource, driver or socket of this name is not watched."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.ignore)

    def problems(self) -> Iterator[str]:
        """Yield the reasons why the section is refused."""
        for name in self.expect:
            yield from errors.prefixed("expect", advertised.name_problems(name, per_match=False))
