"""Pure: What happens to one resource at the kubelet, and what is to be done about it.

A generation is one server on one socket. The door that is told to do something always answers, in
bounded time: Serve with Served, ServeFailed or ServedElsewhere, Register with Registered or
RegisterFailed, End with Ended. `kubelet` tells one kubelet.sock from another; it is empty when
there is none.
"""

from typing import TypeAlias

import msgspec

from muster import vocabulary


class Served(msgspec.Struct, frozen=True):
    """The server of this generation listens."""

    generation: int


class ServeFailed(msgspec.Struct, frozen=True):
    """There is no server of this generation, and nothing left of it."""

    generation: int
    text: str


class ServedElsewhere(msgspec.Struct, frozen=True):
    """Another process serves this resource, so there is no server of this generation."""

    generation: int
    owner: str


class Registered(msgspec.Struct, frozen=True):
    """The kubelet behind this kubelet.sock took the registration."""

    generation: int
    kubelet: str


class RegisterFailed(msgspec.Struct, frozen=True):
    """The kubelet refused, or was not there (`away`); `permanent` if it would refuse again."""

    generation: int
    text: str
    permanent: bool
    away: bool = False


class StreamOpened(msgspec.Struct, frozen=True):
    """The kubelet opened a ListAndWatch."""

    generation: int


class StreamClosed(msgspec.Struct, frozen=True):
    """A ListAndWatch ended, and not because we ended it."""

    generation: int


class KubeletSeen(msgspec.Struct, frozen=True):
    """This kubelet.sock is there now; said at every look, not only when it changed."""

    kubelet: str


class OwnSocketLost(msgspec.Struct, frozen=True):
    """Our socket file is gone, or another stands in its place."""

    generation: int


class ProbePassed(msgspec.Struct, frozen=True):
    """Dialling our own socket by its path reached us."""

    generation: int


class ProbeFailed(msgspec.Struct, frozen=True):
    """Dialling our own socket by its path reached nobody, or somebody else."""

    generation: int
    text: str


class ServerEnded(msgspec.Struct, frozen=True):
    """The server ended without being told to."""

    generation: int


class Ended(msgspec.Struct, frozen=True):
    """Streams, server and socket of this generation are gone."""

    generation: int


FromServer: TypeAlias = Served | ServeFailed | ServedElsewhere | Ended | ServerEnded | OwnSocketLost
FromKubelet: TypeAlias = Registered | RegisterFailed | StreamOpened | StreamClosed
FromProbe: TypeAlias = ProbePassed | ProbeFailed
Signal: TypeAlias = FromServer | FromKubelet | FromProbe | KubeletSeen


class Serve(msgspec.Struct, frozen=True):
    """Make a server on a fresh socket."""

    generation: int


class Register(msgspec.Struct, frozen=True):
    """Register that socket with the kubelet."""

    generation: int


class End(msgspec.Struct, frozen=True):
    """End a Register in flight, the streams, the server; remove the socket."""

    generation: int


class Listed(msgspec.Struct, frozen=True):
    """The kubelet lists the resource: it took the registration and opened its stream."""

    generation: int
    reason: vocabulary.RegistrationReason
    registrations: int


class Lost(msgspec.Struct, frozen=True):
    """The kubelet does not list the resource, or will not for long."""

    reason: vocabulary.RegistrationReason
    detail: str


Report: TypeAlias = Listed | Lost
Action: TypeAlias = Serve | Register | End | Report
