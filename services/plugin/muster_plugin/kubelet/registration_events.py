"""Pure: signals and actions of the registration state machine.

A generation is one server on one socket. The adapter answers every action in bounded time: Serve
with Served, ServeFailed or ServedElsewhere, Register with Registered or RegisterFailed, Stop with
Stopped. `kubelet` identifies one kubelet.sock; it is empty if there is none.
"""

from typing import TypeAlias

import msgspec

from muster import vocabulary


class Served(msgspec.Struct, frozen=True):
    """The server of this generation listens."""

    generation: int


class ServeFailed(msgspec.Struct, frozen=True):
    """The server of this generation could not start, and nothing is left of it."""

    generation: int
    text: str


class ServedElsewhere(msgspec.Struct, frozen=True):
    """Another process serves this resource, so this generation has no server."""

    generation: int
    owner: str


class Registered(msgspec.Struct, frozen=True):
    """The kubelet behind this kubelet.sock accepted the registration."""

    generation: int
    kubelet: str


class RegisterFailed(msgspec.Struct, frozen=True):
    """The kubelet refused (`permanent`: it would refuse again), or was `unreachable`."""

    generation: int
    text: str
    permanent: bool
    unreachable: bool = False


class StreamOpened(msgspec.Struct, frozen=True):
    """The kubelet opened a ListAndWatch."""

    generation: int


class StreamClosed(msgspec.Struct, frozen=True):
    """A ListAndWatch ended that the plugin did not end."""

    generation: int


class KubeletSocketSeen(msgspec.Struct, frozen=True):
    """This kubelet.sock exists now; sent at every check, not only after a change."""

    kubelet: str


class OwnSocketLost(msgspec.Struct, frozen=True):
    """The plugin's socket file is gone or was replaced."""

    generation: int


class ProbePassed(msgspec.Struct, frozen=True):
    """The self-probe reached this server."""

    generation: int


class ProbeFailed(msgspec.Struct, frozen=True):
    """The self-probe reached no server, or another one."""

    generation: int
    text: str


class ServerEnded(msgspec.Struct, frozen=True):
    """The server ended by itself."""

    generation: int


class Stopped(msgspec.Struct, frozen=True):
    """Streams, server and socket of this generation are gone."""

    generation: int


FromServer: TypeAlias = (
    Served | ServeFailed | ServedElsewhere | Stopped | ServerEnded | OwnSocketLost
)
FromKubelet: TypeAlias = Registered | RegisterFailed | StreamOpened | StreamClosed
FromProbe: TypeAlias = ProbePassed | ProbeFailed
Signal: TypeAlias = FromServer | FromKubelet | FromProbe | KubeletSocketSeen


class Serve(msgspec.Struct, frozen=True):
    """Start a server on a fresh socket."""

    generation: int


class Register(msgspec.Struct, frozen=True):
    """Register that socket with the kubelet."""

    generation: int


class Stop(msgspec.Struct, frozen=True):
    """Cancel a Register in flight, end the streams and the server, remove the socket."""

    generation: int


class Listed(msgspec.Struct, frozen=True):
    """The kubelet lists the resource: it accepted the registration and opened its stream."""

    generation: int
    reason: vocabulary.RegistrationReason
    registrations: int


class Lost(msgspec.Struct, frozen=True):
    """The kubelet does not list the resource any more, or soon will not."""

    reason: vocabulary.RegistrationReason
    detail: str


ListingChange: TypeAlias = Listed | Lost
Action: TypeAlias = Serve | Register | Stop | ListingChange
