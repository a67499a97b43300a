"""What an advisory of nats-server means, and that nonsense is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_health.bus import nats_advisories
from muster_health.model import signals
from muster_health.plugin import liveness


def advisory(name: str = "", user: str = "", kind: str = "Client", reason: str = "") -> bytes:
    client = {"id": 7, "name": name, "user": user, "kind": kind, "acc": "MUSTER"}
    return json.dumps({"server": {"id": "NA"}, "client": client, "reason": reason}).encode()


def test_a_client_is_who_its_user_says_before_who_it_says_itself() -> None:
    payload = advisory(name="other b", user="device-plugin node.a")
    assert nats_advisories.decode(nats_advisories.CONNECT, payload) == signals.Connected(
        node="node.a", plugin="device-plugin", server="NA", client=7
    )


def test_without_a_user_of_its_own_its_name_counts() -> None:
    payload = advisory(name="device-plugin a", user="muster", reason="Stale Connection")
    assert nats_advisories.decode(nats_advisories.DISCONNECT, payload) == signals.Disconnected(
        node="a", plugin="device-plugin", server="NA", client=7, reason="Stale Connection"
    )


def test_who_is_a_plugin_of_one_node_is_not_believed_to_be_anothers() -> None:
    own = advisory(name="device-plugin a.b", user="plugin_a_b")
    assert nats_advisories.decode(nats_advisories.CONNECT, own) == signals.Connected(
        node="a.b", plugin="device-plugin", server="NA", client=7
    )
    other = advisory(name="device-plugin c", user="plugin_a_b")
    assert nats_advisories.decode(nats_advisories.DISCONNECT, other) == nats_advisories.Other(
        "device-plugin c", is_there=False
    )


@pytest.mark.parametrize(
    "name", ["", "muster-health", "notifier", "Plugin a", "p A_b", "p ", " a", "p _fleet", "p a b"]
)
def test_who_is_no_plugin_is_another(name: str) -> None:
    told = nats_advisories.decode(nats_advisories.CONNECT, advisory(name=name))
    assert told == nats_advisories.Other(name, is_there=True)


def test_a_leaf_that_goes_is_an_event_of_a_server() -> None:
    payload = advisory(name="leaf-1", kind="Leafnode")
    assert nats_advisories.decode(nats_advisories.DISCONNECT, payload) == signals.ServerEvent(
        server="leaf-1", what="leaf_lost"
    )
    assert isinstance(
        nats_advisories.decode(nats_advisories.CONNECT, payload), nats_advisories.Other
    )


@pytest.mark.parametrize("what", ["lameduck", "shutdown"])
def test_a_server_that_ends_is_named(what: str) -> None:
    told = nats_advisories.decode(f"muster.nats.{what}.NB", b"{}")
    assert told == signals.ServerEvent(server="NB", what=what)


@given(st.one_of(st.binary(max_size=200), st.builds(lambda t: json.dumps(t).encode(), st.text())))
def test_what_is_no_advisory_is_refused(payload: bytes) -> None:
    with pytest.raises(nats_advisories.Unreadable):
        nats_advisories.decode(nats_advisories.CONNECT, payload)


def test_an_advisory_of_nobody_is_refused() -> None:
    with pytest.raises(nats_advisories.Unreadable, match="no client"):
        nats_advisories.decode(nats_advisories.CONNECT, b'{"server": {"id": "NA"}}')


def test_people_are_told_the_beginning_of_a_servers_id_and_all_of_a_name() -> None:
    key = "NDFTEFWZ6MIV2HCBHZPZEFNTFKTKZ4W5U4CFUW7HN6T6OJ3SIIEYQMLD"
    assert (liveness.short_server(key), liveness.short_server("leaf-1")) == ("NDFTEFWZ", "leaf-1")
