"""A stand-in for Slack's incoming webhooks, at an address that muster considers public.

Therefore only the URL in the user's Secret differs from a real workspace. A webhook answers `ok` as
plain text; an unknown one answers `no_service` with 404 (docs.slack.dev, incoming webhooks).
"""

import contextlib
import http.server
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

import muster
from scripts.cluster import layout, node
from tests.worlds import cluster_faults, manifests, real_cluster
from tests.worlds.real_cluster import until

_ADDRESS: Final = "192.31.196.1"
"""An address of AS112, globally reachable according to IANA, that no service uses (RFC 7535)."""
_PATH: Final = "/services/T0000/B0000/XXXX"
_IN_THE_PAGE: Final = "https://hooks.slack.com/services/..."
_MESSAGE_MAX_S: Final = 600.0
_LINK: Final = re.compile(r"<(https?://[^|>]+)\|[^>]+>")


@dataclass(frozen=True, slots=True)
class Posted:
    """One message in the channel, with the monotonic time of its arrival."""

    at: float
    message: dict[str, Any]

    @property
    def title(self) -> str:
        """Return the text that a lock screen shows."""
        return str(self.message["text"])

    @property
    def links(self) -> list[str]:
        """Return the URLs of the links in the message."""
        return _LINK.findall(json.dumps(self.message["attachments"]))


@dataclass
class Slack:
    """A workspace with one webhook, `url`, and the channel that it posts to."""

    url: str
    channel: list[Posted]

    def secret(self) -> str:
        """Return the command of docs/install.md that creates the Secret, with this URL in it."""
        command = real_cluster.block("install.md", "create secret generic slack")
        assert _IN_THE_PAGE in command
        return command.replace(_IN_THE_PAGE, self.url)

    def until_plugin_is_reported(self, *, within_s: float = 240.0) -> Posted:
        """Kill the plugin each time it starts, until a message is posted; return the message."""

        def posted() -> list[Posted]:
            cluster_faults.end_plugin()
            return self.channel

        return until(posted, "Slack has a message", within_s=within_s)[0]


@contextlib.contextmanager
def serving() -> Iterator[Slack]:
    """Serve at an address that pods of this machine's cluster can reach; yield the workspace."""
    if node.first() is None:
        pytest.skip("Slack's stand-in needs the network of the cluster that make cluster starts")
    channel: list[Posted] = []

    class Webhook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == _PATH:
                channel.append(Posted(time.monotonic(), json.loads(body)))
                self._answer(200, b"ok")
            else:
                self._answer(404, b"no_service")

        def _answer(self, status: int, text: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    ip = shutil.which("ip") or "ip"
    own = (f"{_ADDRESS}/32", "dev", layout.LINK)
    subprocess.run([ip, "address", "replace", *own], check=True)
    try:
        with http.server.ThreadingHTTPServer((_ADDRESS, 0), Webhook) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield Slack(f"http://{_ADDRESS}:{server.server_address[1]}{_PATH}", channel)
            server.shutdown()
    finally:
        subprocess.run([ip, "address", "delete", *own], check=True)


def tried(cluster: real_cluster.Cluster, folder: Path, workspace: Slack, *, since: float) -> str:
    """Check that a pod gets a device, and that Slack gets a message when the plugin fails.

    `since` is the time of the first command of the installation. Returns a text that says how long
    the message took from then.
    """
    printed = cluster.shell(real_cluster.block("install.md", "try-muster"), folder)
    assert "/dev/fuse" in printed.splitlines()
    posted = workspace.until_plugin_is_reported()
    assert re.match(rf"device-plugin (\(\S+\) )?on {cluster.node} is down", posted.title)
    assert posted.links
    for link in posted.links:
        page = link.removeprefix(muster.RUNBOOKS_URL)
        assert page != link
        file = manifests.ROOT / "docs/runbooks" / page.partition("#")[0]
        assert file.with_suffix(".md").is_file()
    assert posted.at - since < _MESSAGE_MAX_S
    return f"a message in Slack {posted.at - since:.0f} s after the first command"
