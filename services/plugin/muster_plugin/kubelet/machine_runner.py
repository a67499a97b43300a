"""Pure: How a machine of this room is spoken to and driven; the wiring makes them."""

from collections.abc import Awaitable, Callable, Coroutine
from typing import Generic, NamedTuple, Protocol, TypeVar

from muster import machine

In = TypeVar("In")
Out = TypeVar("Out")


class Line(NamedTuple, Generic[In, Out]):
    """`tell` gives the machine an input; `drive` runs it for ever, and has its outputs acted on."""

    tell: Callable[[In], None]
    drive: Callable[
        [machine.Machine[In, Out], Callable[[Out], Awaitable[None]]],
        Coroutine[object, object, None],
    ]


class Lines(Protocol):
    """Makes a line for one machine."""

    def __call__(self) -> Line[In, Out]:
        """Make one."""
