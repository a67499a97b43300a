"""Pure: the protocol of one connection to an NRI runtime, from registration to close.

| from the runtime              | answer                             | observation             |
|-------------------------------|------------------------------------|-------------------------|
| RegisterPlugin's response     | -; an error raises Refused         | -                       |
| Configure                     | the events wanted: CREATE_CONTAINER | -                       |
| Synchronize, more to come     | more                               | -                       |
| Synchronize                   | no update                          | Synchronized            |
| CreateContainer               | the device, nothing, or an error   | Granted, Rejected, or none |
| Shutdown                      | empty                              | -                       |
| anything else                 | error UNIMPLEMENTED                | -                       |

Requests may come in any order, even before the response to the registration. An answer depends only
on the request: while the runtime waits for it, no container is created on the node, and after 2 s
the runtime gives up (containerd/nri v0.12 `pkg/adaptation`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from google.protobuf import message

from muster.pb import nri_pb2, ttrpc_pb2
from muster_fuse.nri import grants, wire

EVENTS: Final = 1 << (4 - 1)
"""The mask of the events that the plugin requests: CREATE_CONTAINER alone.

0 would mean all events, and the runtime refuses an unknown event.
"""
_NAME: Final = "muster-fuse"
_INDEX: Final = "20"
_RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"
_REGISTRATION_STREAM: Final = 1
_PERMISSION_DENIED: Final = 7
_UNIMPLEMENTED: Final = 12
_STOPPED: Final = 4
_LISTED_MAX: Final = 100_000
"""The maximum number of containers, and of pods, that a runtime may list."""


class Refused(Exception):
    """The runtime refused the registration or violated the protocol; the text is the reason."""


class Synchronized(msgspec.Struct, frozen=True, kw_only=True):
    """The registration is complete: the runtime will call the plugin for each new container.

    `without_device` are the existing containers that lack the device their pods request.
    """

    runtime: str
    without_device: tuple[grants.Container, ...]


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """A container that will start with the device."""

    container: grants.Container


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A container that will not start, because it was denied the device."""

    container: grants.Container
    denied: grants.Denied


Observation = Synchronized | Granted | Rejected


class Session:
    """The plugin's side of a connection; the caller transfers the bytes."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._namespaces = namespaces
        self._frames = wire.FrameReader()
        self._pods: dict[str, nri_pb2.PodSandbox] = {}
        self._containers: list[nri_pb2.Container] = []
        self._runtime = ""
        self._observed: list[Observation] = []
        self._methods: Mapping[str, Callable[[bytes], message.Message | grants.Denied]] = {
            "Configure": self._configure,
            "Synchronize": self._synchronize,
            "CreateContainer": self._create_container,
            "Shutdown": lambda _: nri_pb2.Empty(),
        }

    def begin(self) -> bytes:
        """Return the first bytes to send: the registration."""
        registration = nri_pb2.RegisterPluginRequest(plugin_name=_NAME, plugin_idx=_INDEX)
        request = ttrpc_pb2.Request(
            service=_RUNTIME_SERVICE,
            method="RegisterPlugin",
            payload=registration.SerializeToString(),
        )
        return wire.encode(
            wire.Frame(
                wire.Connection.RUNTIME,
                _REGISTRATION_STREAM,
                wire.Kind.REQUEST,
                request.SerializeToString(),
            )
        )

    def receive(self, received: bytes) -> tuple[bytes, list[Observation]]:
        """Return the bytes to send, and the observations. Raises Refused."""
        try:
            answers = [self._answer(frame) for frame in self._frames.feed(received)]
        except (wire.MalformedFrame, message.DecodeError) as error:
            raise Refused(f"protocol error: {error}") from None
        observed, self._observed = self._observed, []
        return b"".join(answers), observed

    def _answer(self, frame: wire.Frame) -> bytes:
        if frame.connection is wire.Connection.RUNTIME:
            _check_registration(frame)
            return b""
        if frame.kind is not wire.Kind.REQUEST:
            raise Refused(f"protocol error: a {frame.kind.name} message instead of a request")
        request = ttrpc_pb2.Request.FromString(frame.data)
        method = self._methods.get(request.method)
        response = ttrpc_pb2.Response()
        answer = method(request.payload) if method else None
        if answer is None:
            response.status.code = _UNIMPLEMENTED
            response.status.message = f"{request.method[:100]} is not implemented"
        elif isinstance(answer, grants.Denied):
            response.status.code = _PERMISSION_DENIED
            response.status.message = answer.text
        else:
            response.payload = answer.SerializeToString()
        data = response.SerializeToString()
        return wire.encode(wire.Frame(frame.connection, frame.stream, wire.Kind.RESPONSE, data))

    def _configure(self, payload: bytes) -> nri_pb2.ConfigureResponse:
        request = nri_pb2.ConfigureRequest.FromString(payload)
        self._runtime = f"{request.runtime_name} {request.runtime_version}"
        return nri_pb2.ConfigureResponse(events=EVENTS)

    def _synchronize(self, payload: bytes) -> nri_pb2.SynchronizeResponse:
        request = nri_pb2.SynchronizeRequest.FromString(payload)
        self._pods |= {pod.id: pod for pod in request.pods}
        self._containers += request.containers
        if max(len(self._pods), len(self._containers)) > _LISTED_MAX:
            raise Refused(f"the runtime listed more than {_LISTED_MAX} pods or containers")
        if not request.more:
            without = tuple(filter(None, map(self._without_device, self._containers)))
            self._pods, self._containers = {}, []
            self._observed.append(Synchronized(runtime=self._runtime, without_device=without))
        return nri_pb2.SynchronizeResponse(more=request.more)

    def _without_device(self, container: nri_pb2.Container) -> grants.Container | None:
        """Return the container if it lacks the device that its pod requests; otherwise None."""
        pod = self._pods.get(container.pod_sandbox_id)
        if pod is None or container.state == _STOPPED or _has_device(container):
            return None
        named = _named(pod, container)
        decision = grants.decide(named, pod.annotations, namespaces=self._namespaces)
        return named if decision is grants.Decision.DEVICE else None

    def _create_container(self, payload: bytes) -> nri_pb2.CreateContainerResponse | grants.Denied:
        request = nri_pb2.CreateContainerRequest.FromString(payload)
        pod, container = request.pod, _named(request.pod, request.container)
        decision = grants.decide(container, pod.annotations, namespaces=self._namespaces)
        if isinstance(decision, grants.Denied):
            self._observed.append(Rejected(container=container, denied=decision))
            return decision
        response = nri_pb2.CreateContainerResponse()
        # two plugins that add the same device conflict, and the container does not start
        if decision is grants.Decision.DEVICE and not _has_device(request.container):
            device = response.adjust.linux.devices.add(
                path=grants.PATH, type="c", major=grants.MAJOR, minor=grants.MINOR
            )
            device.file_mode.value = grants.MODE
            self._observed.append(Granted(container=container))
        return response


def _check_registration(frame: wire.Frame) -> None:
    if frame.kind is not wire.Kind.RESPONSE or frame.stream != _REGISTRATION_STREAM:
        raise Refused("protocol error: a message that answers none of our requests")
    status = ttrpc_pb2.Response.FromString(frame.data).status
    if status.code:
        raise Refused(f"registration refused: {status.message}")


def _has_device(container: nri_pb2.Container) -> bool:
    return any(device.path == grants.PATH for device in container.linux.devices)


def _named(pod: nri_pb2.PodSandbox, container: nri_pb2.Container) -> grants.Container:
    return grants.Container(
        id=container.id, namespace=pod.namespace, pod=pod.name, name=container.name
    )
