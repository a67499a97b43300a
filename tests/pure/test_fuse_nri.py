"""The NRI plugin's protocol and its decision, without a runtime."""

import contextlib
import itertools
import struct
from collections.abc import Sequence
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from muster.pb import nri_pb2
from muster_fuse.nri import grants, session, wire
from tests.worlds import nri_runtime
from tests.worlds.nri_runtime import ANNOTATED

FRAMES: Final = st.lists(
    st.builds(
        wire.Frame,
        st.sampled_from(wire.Connection),
        st.integers(0, 2**32 - 1),
        st.sampled_from(wire.Kind),
        st.binary(max_size=40),
    ),
    max_size=6,
)
MAIN: Final = grants.Container(id="id-main", namespace="default", pod="web", name="main")


def fed(reader: wire.FrameReader, sent: bytes, cuts: Sequence[int]) -> list[wire.Frame]:
    """Feed bytes in pieces; return the frames that they contain."""
    edges = [0, *sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]
    pieces = itertools.pairwise(edges)
    return [frame for begin, end in pieces for frame in reader.feed(sent[begin:end])]


@given(FRAMES, st.lists(st.integers(0, 10_000), max_size=10))
def test_frames_arrive_whole_and_in_order_wherever_they_are_cut(
    frames: list[wire.Frame], cuts: list[int]
) -> None:
    sent = b"".join(map(wire.encode, frames))
    assert fed(wire.FrameReader(), sent, cuts) == frames
    assert fed(wire.FrameReader(), sent, range(len(sent))) == frames


@given(FRAMES, FRAMES, st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_a_message_may_be_spread_over_frames_of_the_multiplexer_among_those_of_others(
    ours: list[wire.Frame], theirs: list[wire.Frame], lengths: list[int]
) -> None:
    frames = {
        connection: [frame._replace(connection=connection) for frame in content]
        for connection, content in zip(wire.Connection, (ours, theirs), strict=True)
    }
    rest = {
        connection: b"".join(wire.encode(frame)[8:] for frame in content)
        for connection, content in frames.items()
    }
    sent, turn = b"", 0
    while any(rest.values()):
        for connection, content in rest.items():
            part, rest[connection] = (
                content[: lengths[turn % len(lengths)]],
                content[lengths[turn % len(lengths)] :],
            )
            sent += struct.pack(">II", connection, len(part)) + part
        turn += 1
    arrived = wire.FrameReader().feed(sent)
    for connection, expected in frames.items():
        assert [frame for frame in arrived if frame.connection is connection] == expected


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">II", 1, wire.DATA_MAX + 11),
        struct.pack(">II", 1, 2**32 - 1),
        struct.pack(">II", 0, 10),
        struct.pack(">II", 3, 10),
        struct.pack(">IIIIBB", 1, 10, wire.DATA_MAX + 1, 1, 1, 0),
        struct.pack(">IIIIBB", 1, 10, 2**32 - 1, 1, 1, 0),
        struct.pack(">IIIIBB", 1, 10, 0, 1, 0, 0),
        struct.pack(">IIIIBB", 1, 10, 0, 1, 4, 0),
    ],
)
def test_a_hostile_length_connection_or_kind_is_refused_before_its_data_arrives(
    head: bytes,
) -> None:
    with pytest.raises(wire.MalformedFrame):
        wire.FrameReader().feed(head)


def test_the_longest_message_is_read() -> None:
    frame = wire.Frame(wire.Connection.PLUGIN, 1, wire.Kind.REQUEST, bytes(wire.DATA_MAX))
    assert wire.FrameReader().feed(wire.encode(frame)) == [frame]


@given(st.lists(st.binary(max_size=60), max_size=5))
@example([nri_runtime.request("CreateContainer", b"\xff")])
@example([nri_runtime.registered(), b"\0" * 18])
def test_no_bytes_of_a_runtime_do_anything_but_answer_or_end_the_connection(
    received: list[bytes],
) -> None:
    current = session.Session(["*"])
    with contextlib.suppress(session.Refused):
        for part in received:
            current.receive(part)


def test_the_plugin_registers_first() -> None:
    (frame,) = wire.FrameReader().feed(session.Session(["*"]).begin())
    assert (frame.connection, frame.stream, frame.kind) == (
        wire.Connection.RUNTIME,
        1,
        wire.Kind.REQUEST,
    )
    assert b"nri.pkg.api.v1alpha1.Runtime" in frame.data
    assert b"RegisterPlugin" in frame.data


def test_it_wants_no_event_but_the_creation_of_containers_even_before_it_is_registered() -> None:
    current = session.Session(["*"])
    configure = nri_pb2.ConfigureRequest(runtime_name="containerd", runtime_version="2.4")
    answer, observed = current.receive(nri_runtime.request("Configure", configure, stream=7))
    ((stream, response),) = nri_runtime.responses(answer)
    assert (stream, nri_pb2.ConfigureResponse.FromString(response.payload).events) == (7, 8)
    assert observed == []
    assert current.receive(nri_runtime.registered()) == (b"", [])


def test_a_refused_registration_ends_the_connection_with_the_runtimes_text() -> None:
    with pytest.raises(session.Refused, match="registration refused: invalid plugin index"):
        session.Session(["*"]).receive(nri_runtime.registered(code=3, text="invalid plugin index"))


def test_a_synchronization_in_parts_is_continued_and_reports_at_its_end() -> None:
    current = session.Session(["default"])
    annotated, plain, foreign = (
        nri_runtime.pod(ANNOTATED),
        nri_runtime.pod({}, namespace="plain"),
        nri_runtime.pod(ANNOTATED, namespace="foreign"),
    )
    first = nri_pb2.SynchronizeRequest(
        containers=[
            nri_runtime.container(annotated),
            nri_runtime.container(annotated, "with", has_device=True),
            nri_runtime.container(annotated, "stopped", state=4),
        ],
        more=True,
    )
    last = nri_pb2.SynchronizeRequest(
        pods=[annotated, plain, foreign],
        containers=[nri_runtime.container(plain), nri_runtime.container(foreign)],
    )
    answers, observed = [], []
    for part in (first, last):
        answer, seen = current.receive(nri_runtime.request("Synchronize", part))
        ((_, response),) = nri_runtime.responses(answer)
        answers.append(nri_pb2.SynchronizeResponse.FromString(response.payload))
        observed.append(seen)
    assert [answer.more for answer in answers] == [True, False]
    assert observed == [[], [session.Synchronized(runtime="", without_device=(MAIN,))]]


@pytest.mark.parametrize("method", ["StateChange", "RunPodSandbox", "", "x" * 5000])
def test_an_unknown_method_is_answered_as_not_implemented(method: str) -> None:
    answer, observed = session.Session(["*"]).receive(nri_runtime.request(method, b""))
    ((_, response),) = nri_runtime.responses(answer)
    assert (response.status.code, response.payload, observed) == (12, b"", [])


def created(
    annotations: dict[str, str], *, namespaces: Sequence[str] = ("*",), has_device: bool = False
) -> tuple[nri_pb2.CreateContainerResponse, int, str, list[session.Observation]]:
    """Create a container; return the adjustment, code and text of the status, and observations."""
    pod = nri_runtime.pod(annotations)
    request = nri_pb2.CreateContainerRequest(
        pod=pod, container=nri_runtime.container(pod, has_device=has_device)
    )
    answer, observed = session.Session(namespaces).receive(
        nri_runtime.request("CreateContainer", request)
    )
    ((_, response),) = nri_runtime.responses(answer)
    adjusted = nri_pb2.CreateContainerResponse.FromString(response.payload)
    return adjusted, response.status.code, response.status.message, observed


def test_an_annotated_container_is_given_the_device_and_nothing_else() -> None:
    adjusted, code, _, observed = created(ANNOTATED)
    device = nri_pb2.LinuxDevice(
        path="/dev/fuse",
        type="c",
        major=10,
        minor=229,
        file_mode=nri_pb2.OptionalFileMode(value=0o666),
    )
    linux = nri_pb2.LinuxContainerAdjustment(devices=[device])
    assert adjusted == nri_pb2.CreateContainerResponse(
        adjust=nri_pb2.ContainerAdjustment(linux=linux)
    )
    assert (code, observed) == (0, [session.Granted(container=MAIN)])


@pytest.mark.parametrize(
    ("annotations", "has_device"),
    [
        ({}, False),
        ({"fuse.muster.dev/mount": "true"}, False),
        ({grants.ANNOTATION: "false"}, False),
        (ANNOTATED, True),
    ],
)
def test_other_containers_and_those_that_have_the_device_are_left_alone(
    annotations: dict[str, str], *, has_device: bool
) -> None:
    nothing = nri_pb2.CreateContainerResponse()
    assert created(annotations, has_device=has_device) == (nothing, 0, "", [])


def test_a_denial_fails_the_container_with_its_reason() -> None:
    adjusted, code, text, observed = created(ANNOTATED, namespaces=["team-*"])
    assert adjusted == nri_pb2.CreateContainerResponse()
    assert code == 7
    assert text == (
        "namespace default may not use /dev/fuse: it matches none of `namespaces` in the settings "
        "of muster-fuse-nri"
    )
    denied = grants.Denied(reason=grants.Reason.NAMESPACE, text=text)
    assert observed == [session.Rejected(container=MAIN, denied=denied)]


OWN: Final = f"{grants.ANNOTATION}.container.main"


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({grants.ANNOTATION: "true"}, grants.Decision.DEVICE),
        ({OWN: "true"}, grants.Decision.DEVICE),
        ({OWN: "true", grants.ANNOTATION: "false"}, grants.Decision.DEVICE),
        ({OWN: "false", grants.ANNOTATION: "true"}, grants.Decision.NOTHING),
        ({f"{grants.ANNOTATION}.container.other": "true"}, grants.Decision.NOTHING),
    ],
)
def test_the_annotation_of_a_container_wins_over_that_of_the_pod(
    annotations: dict[str, str], expected: grants.Decision
) -> None:
    assert grants.decide(MAIN, annotations, namespaces=["*"]) is expected


@given(st.text(max_size=60).filter(lambda value: value not in {"true", "false"}))
def test_any_other_value_is_denied_and_quoted(value: str) -> None:
    denied = grants.decide(MAIN, {grants.ANNOTATION: value}, namespaces=["*"])
    assert denied == grants.Denied(
        reason=grants.Reason.VALUE,
        text=f'annotation {grants.ANNOTATION} is {value[:40]!r}; it must be "true" or "false"',
    )


@pytest.mark.parametrize(
    ("namespaces", "is_allowed"),
    [
        (["*"], True),
        (["default"], True),
        (["team-*", "def*"], True),
        (["team"], False),
        ([], False),
    ],
)
def test_only_allowed_namespaces_are_given_the_device(
    namespaces: list[str], *, is_allowed: bool
) -> None:
    decision = grants.decide(MAIN, ANNOTATED, namespaces=namespaces)
    assert (decision is grants.Decision.DEVICE) == is_allowed
