"""Pure: the interface of every state machine: time is an argument, actions are returned as values.

`now` is the receiver's monotonic clock in seconds. A machine never reads the time, never waits and
never acts; `muster.service.runtime.drive` passes its inputs and executes the actions that it
returns.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

In_contra = TypeVar("In_contra", contravariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class Machine(Protocol[In_contra, Out_co]):
    """A state machine that `drive` can drive."""

    def receive(self, event: In_contra, now: float) -> Sequence[Out_co]:
        """Handle one input; return the resulting actions, in order."""

    def tick(self, now: float) -> Sequence[Out_co]:
        """Return the actions due at `now`; then `next_deadline()` is None or later than `now`."""

    def next_deadline(self) -> float | None:
        """Return when `tick` must next be called, or None if nothing is due without a new input."""


In = TypeVar("In")
Out = TypeVar("Out")


class MachineRunner(NamedTuple, Generic[In, Out]):
    """Runs a machine: `send` queues an input; `drive` runs the machine and executes its actions."""

    send: Callable[[In], None]
    drive: Callable[
        [Machine[In, Out], Callable[[Out], Awaitable[None]]],
        Coroutine[object, object, None],
    ]


class NewRunner(Protocol):
    """Creates a runner for one machine."""

    def __call__(self) -> MachineRunner[In, Out]:
        """Return a new runner."""
