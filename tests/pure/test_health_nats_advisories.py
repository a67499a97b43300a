"""What an advisory of nats-server means, and that anything else is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.nats.auth import permissions
from muster_health.bus import nats_connections
from muster_health.model import signals
from muster_health.plugin import liveness


def advisory(
    name: str = "",
    user: str = "",
    kind: str = "Client",
    reason: str = "",
    tags: tuple[str, ...] = (),
    account: str = "",
) -> bytes:
    client = {"id": 7, "name": name, "user": user, "kind": kind, "acc": "MUSTER", "tags": tags}
    client |= {"acc": "A" * 56, "name_tag": account} if account else {"name_tag": "MUSTER"}
    return json.dumps({"server": {"id": "NA"}, "client": client, "reason": reason}).encode()


def test_a_clients_user_takes_precedence_over_its_name() -> None:
    payload = advisory(name="other b", user="device-plugin node.a")
    assert nats_connections.decode(nats_connections.CONNECT, payload) == signals.Connected(
        node="node.a", plugin="device-plugin", server="NA", client=7
    )


def test_without_a_user_of_its_own_a_clients_name_counts() -> None:
    payload = advisory(name="device-plugin a", user="muster", reason="Stale Connection")
    assert nats_connections.decode(nats_connections.DISCONNECT, payload) == signals.Disconnected(
        node="a", plugin="device-plugin", server="NA", client=7, reason="Stale Connection"
    )


def test_a_user_of_one_nodes_plugin_cannot_pass_for_another_nodes() -> None:
    own = advisory(name="device-plugin a.b", user="plugin_a_b")
    assert nats_connections.decode(nats_connections.CONNECT, own) == signals.Connected(
        node="a.b", plugin="device-plugin", server="NA", client=7
    )
    other = advisory(name="device-plugin c", user="plugin_a_b")
    assert nats_connections.decode(
        nats_connections.DISCONNECT, other
    ) == nats_connections.OtherClient("device-plugin c", is_connected=False)


@pytest.mark.parametrize("user", ["device-plugin b", "plugin_b", "UABC", ""])
def test_credentials_of_one_node_cannot_pass_for_another_whatever_user_they_name(user: str) -> None:
    tags = ("plugin:other", "node:a")
    other = advisory(name="device-plugin b", user=user, tags=tags)
    assert nats_connections.decode(
        nats_connections.DISCONNECT, other
    ) == nats_connections.OtherClient("device-plugin b", is_connected=False)
    own = advisory(name="device-plugin a", user="UABC", tags=tags)
    assert nats_connections.decode(nats_connections.CONNECT, own) == signals.Connected(
        node="a", plugin="device-plugin", server="NA", client=7
    )


@pytest.mark.parametrize("subject", [nats_connections.CONNECT, nats_connections.DISCONNECT])
@pytest.mark.parametrize(
    ("user", "account"),
    [
        # a client with credentials can choose the user name in the advisory
        ("UABC", "MUSTER"),
        ("", "MUSTER"),
        ("plugin_b", "MUSTER"),
        ("device-plugin b", "MUSTER"),
        # with passwords, the advisory names no account
        *((grant.user, "") for grant in permissions.central()),
    ],
)
def test_a_reader_or_service_cannot_pass_for_a_plugin(
    subject: str, user: str, account: str
) -> None:
    other = advisory(name="device-plugin b", user=user, account=account)
    is_connected = subject == nats_connections.CONNECT
    assert nats_connections.decode(subject, other) == nats_connections.OtherClient(
        "device-plugin b", is_connected=is_connected
    )
    own = advisory(name="device-plugin b", user="plugin_b", account="PLUGINS")
    assert isinstance(
        nats_connections.decode(subject, own), signals.Connected | signals.Disconnected
    )


@pytest.mark.parametrize(
    "name", ["", "muster-health", "notifier", "Plugin a", "p A_b", "p ", " a", "p _fleet", "p a b"]
)
def test_a_client_that_is_no_plugin_is_another_client(name: str) -> None:
    decoded = nats_connections.decode(nats_connections.CONNECT, advisory(name=name))
    assert decoded == nats_connections.OtherClient(name, is_connected=True)


def test_a_lost_leaf_is_an_event_of_a_server() -> None:
    payload = advisory(name="leaf-1", kind="Leafnode")
    assert nats_connections.decode(nats_connections.DISCONNECT, payload) == signals.ServerEvent(
        server="leaf-1", what="leaf_lost"
    )
    assert isinstance(
        nats_connections.decode(nats_connections.CONNECT, payload), nats_connections.OtherClient
    )


@pytest.mark.parametrize("what", ["lameduck", "shutdown"])
def test_a_stopping_server_is_named(what: str) -> None:
    decoded = nats_connections.decode(f"muster.nats.{what}.NB", b"{}")
    assert decoded == signals.ServerEvent(server="NB", what=what)


@given(st.one_of(st.binary(max_size=200), st.builds(lambda t: json.dumps(t).encode(), st.text())))
def test_anything_but_an_advisory_is_refused(payload: bytes) -> None:
    with pytest.raises(nats_connections.Unreadable):
        nats_connections.decode(nats_connections.CONNECT, payload)


@pytest.mark.parametrize("subject", ["muster.nats.other", "muster.nats.connect.x", "muster.nats."])
def test_another_subject_is_no_advisory(subject: str) -> None:
    with pytest.raises(nats_connections.Unreadable, match="not the subject of an advisory"):
        nats_connections.decode(subject, advisory(name="x"))


def test_an_advisory_without_a_client_is_refused() -> None:
    with pytest.raises(nats_connections.Unreadable, match="no client"):
        nats_connections.decode(nats_connections.CONNECT, b'{"server": {"id": "NA"}}')


def test_a_servers_id_is_shortened_for_people_and_its_name_is_not() -> None:
    key = "NDFTEFWZ6MIV2HCBHZPZEFNTFKTKZ4W5U4CFUW7HN6T6OJ3SIIEYQMLD"
    assert (liveness.short_server(key), liveness.short_server("leaf-1")) == ("NDFTEFWZ", "leaf-1")
