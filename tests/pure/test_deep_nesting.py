"""JSON that is nested too deeply for the parser is refused like any other malformed bytes.

msgspec raises RecursionError for it, also in a field that is ignored. If this were not caught, one
such value in a bucket or a queue would end its service after every restart.
"""

from collections.abc import Callable

import pytest

from muster import codec, matching
from muster.nats import leader_lock
from muster_health.bus import nats_connections
from muster_health.model import snapshot
from muster_labeler.kubernetes import projection
from muster_notifier.receivers import answers
from muster_notifier.routing import notifications

DEEP = b'{"no such field":' + b"[" * 15_000


@pytest.mark.parametrize(
    ("decode", "error"),
    [
        (lambda: codec.decode("muster.event.a.p.x", DEEP), codec.MalformedEvent),
        (lambda: codec.decode_heartbeat(DEEP), codec.MalformedEvent),
        (lambda: matching.decode_silence(DEEP), matching.MalformedSilence),
        (lambda: notifications.decode(DEEP), notifications.Malformed),
        (lambda: notifications.decode_entry(DEEP), notifications.Malformed),
        (lambda: nats_connections.decode("muster.nats.connect", DEEP), nats_connections.Unreadable),
        (lambda: snapshot.decode(DEEP), ValueError),
        (lambda: projection.decode_inventory(DEEP.decode()), projection.UnreadableInventory),
    ],
)
def test_deeply_nested_json_is_refused(
    decode: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        decode()


def test_deeply_nested_json_is_no_answer_and_names_no_holder() -> None:
    assert answers.read_slack_reply(DEEP).error
    assert leader_lock.decode_holder(DEEP) is None
