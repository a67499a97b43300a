"""The client of health's replicas behind one name, such as that of a headless Service."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from muster.fleet import health_client

NAME = "muster-health.example"


@dataclass
class Fleet:
    """Stand-ins for replicas: the term of each if it leads, and the requests to all of them."""

    terms: dict[str, int | None]
    port: int = 0
    asked: list[tuple[str, str]] = field(default_factory=list)
    resolved: int = 0

    def resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of all replicas, including those that do not answer."""
        assert (host, port) == (NAME, self.port)
        self.resolved += 1
        return list(self.terms)

    def replicas(self) -> health_client.Replicas:
        """Return a client of the replicas."""
        return health_client.Replicas([f"http://{NAME}:{self.port}"], resolve=self.resolve)

    def addresses(self) -> list[str]:
        """Return the addresses that were asked since the last call."""
        addresses = [address for address, _ in self.asked]
        self.asked.clear()
        return addresses


def serve(fleet: Fleet, address: str) -> http.server.ThreadingHTTPServer:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fleet.asked.append((address, self.headers["Host"]))
            service = {"leads": fleet.terms[address]}
            body = json.dumps({"plugins": [], "fleet": {}, "service": service}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, fleet.port), Health)
    fleet.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    return server


@contextlib.contextmanager
def serving(fleet: Fleet, *absent: str) -> Iterator[None]:
    servers = [serve(fleet, address) for address in fleet.terms if address not in absent]
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_each_address_of_a_name_is_asked_until_the_leader_is_among_them() -> None:
    fleet = Fleet({"127.0.0.2": None, "127.0.0.3": 7, "127.0.0.4": None})
    with serving(fleet):
        replicas = fleet.replicas()
        assert replicas.read("node=a").service.revision == 7
        # a reverse proxy chooses by the name in the header Host
        assert fleet.asked == [(f"127.0.0.{at}", f"{NAME}:{fleet.port}") for at in (2, 3)]
        fleet.addresses()
        assert replicas.read("").service.revision == 7
        assert (fleet.addresses(), fleet.resolved) == (["127.0.0.3"], 1)


def test_who_no_longer_leads_is_asked_once_and_the_name_is_resolved_again() -> None:
    fleet = Fleet({"127.0.0.2": None, "127.0.0.3": 7})
    with serving(fleet):
        replicas = fleet.replicas()
        replicas.read("")
        fleet.addresses()
        fleet.terms.update({"127.0.0.2": 8, "127.0.0.3": None})
        assert replicas.read("").service.revision == 8
        assert (fleet.addresses(), fleet.resolved) == (["127.0.0.3", "127.0.0.2"], 2)
        assert replicas.read("").service.revision == 8
        assert (fleet.addresses(), fleet.resolved) == (["127.0.0.2"], 2)


def test_an_address_where_nobody_answers_is_passed_over() -> None:
    fleet = Fleet({"127.0.0.2": 7, "127.0.0.3": None})
    with serving(fleet, "127.0.0.2"):
        replicas = fleet.replicas()
        assert replicas.read("").service.revision is None
        assert fleet.addresses() == ["127.0.0.3"]
        fleet.terms["127.0.0.3"] = 8
        assert replicas.read("").service.revision == 8


def test_if_no_address_answers_the_first_is_named() -> None:
    fleet = Fleet({"127.0.0.2": 7, "127.0.0.3": None})
    with serving(fleet):
        pass
    with pytest.raises(
        ConnectionError, match=rf"http://127\.0\.0\.2:{fleet.port}/state: .*refused"
    ):
        fleet.replicas().read("")


def test_a_name_with_one_address_or_none_is_asked_as_it_is() -> None:
    fleet = Fleet({"127.0.0.1": 7})
    with serving(fleet):
        asked = health_client.Replicas([f"http://127.0.0.1:{fleet.port}"])
        assert asked.read("").service.revision == 7
    unknown = health_client.Replicas(["http://muster-health.invalid:8080"])
    with pytest.raises(ConnectionError, match=r"http://muster-health\.invalid:8080/state: "):
        unknown.read("")


def test_no_more_addresses_are_asked_than_there_may_be() -> None:
    assert health_client.addresses_of("127.0.0.1", 80) == ["127.0.0.1"]
    fleet = Fleet(dict.fromkeys((f"127.0.0.{at}" for at in range(2, 22)), None))
    with serving(fleet):
        assert fleet.replicas().read("").service.revision is None
    assert len(fleet.addresses()) == health_client.ADDRESSES_MAX


def test_a_page_that_is_too_large_or_never_ends_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health_client, "_PAGE_BYTES_MAX", 1024**2)
    monkeypatch.setattr(health_client, "_READ_S", 0.05)
    ended = threading.Event()

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                if "large" in self.path:
                    self.wfile.write(b" " * 2 * 1024**2)
                while not ended.wait(0.02):
                    self.wfile.write(b" ")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(ConnectionError, match=r"no complete answer within 0\.05 s"):
            health_client.read_state(url, "node=slow")
        monkeypatch.setattr(health_client, "_READ_S", 60.0)
        with pytest.raises(health_client.UnreadableState, match="is larger than 1 MiB"):
            health_client.read_state(url, "node=large")
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
