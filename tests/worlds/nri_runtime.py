"""The runtime's side of an NRI connection: encodes its messages, and decodes the plugin's."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from google.protobuf import message

from muster.pb import nri_pb2, ttrpc_pb2
from muster_fuse.nri import wire

SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
ANNOTATED: Final = {"fuse.muster.dev/device": "true"}


def request(
    method: str, payload: message.Message | bytes, *, stream: int = 1, service: str = SERVICE
) -> bytes:
    """Return an encoded request that calls a method of the plugin."""
    content = payload if isinstance(payload, bytes) else payload.SerializeToString()
    envelope = ttrpc_pb2.Request(service=service, method=method, payload=content)
    return wire.encode(
        wire.Frame(wire.Connection.PLUGIN, stream, wire.Kind.REQUEST, envelope.SerializeToString())
    )


def registered(*, code: int = 0, text: str = "") -> bytes:
    """Return the encoded response to a plugin's registration, an error if `code` is not 0."""
    response = ttrpc_pb2.Response(payload=nri_pb2.Empty().SerializeToString())
    if code:
        response.status.code, response.status.message = code, text
    data = response.SerializeToString()
    return wire.encode(wire.Frame(wire.Connection.RUNTIME, 1, wire.Kind.RESPONSE, data))


def responses(sent: bytes) -> Iterator[tuple[int, ttrpc_pb2.Response]]:
    """Yield each response that a plugin sent, after the number of its stream."""
    for frame in wire.FrameReader().feed(sent):
        assert (frame.connection, frame.kind) == (wire.Connection.PLUGIN, wire.Kind.RESPONSE)
        yield frame.stream, ttrpc_pb2.Response.FromString(frame.data)


def pod(annotations: Mapping[str, str], *, namespace: str = "default") -> nri_pb2.PodSandbox:
    """Return a pod."""
    return nri_pb2.PodSandbox(
        id=f"sandbox-{namespace}", name="web", namespace=namespace, annotations=annotations
    )


def container(
    sandbox: nri_pb2.PodSandbox, name: str = "main", *, state: int = 3, has_device: bool = False
) -> nri_pb2.Container:
    """Return a container of a pod, by default a running one without a device."""
    devices: list[Any] = [nri_pb2.LinuxDevice(path="/dev/fuse", type="c", major=10, minor=229)]
    return nri_pb2.Container(
        id=f"id-{name}",
        pod_sandbox_id=sandbox.id,
        name=name,
        state=state,
        linux=nri_pb2.LinuxContainer(devices=devices if has_device else []),
    )
