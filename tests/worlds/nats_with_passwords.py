"""A nats-server with the configuration of the minimal overlay, and a gate with a password."""

import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

from muster.local import nats as local
from muster.local import processes
from muster.nats.auth import permissions, server_conf
from muster_gate import issuer
from tests.worlds import bus_subjects, token_issuer

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "p" + "0123456789abcdef" * 3
"""The password of every user."""


def configuration(where: Path) -> Path:
    """Write the base's configuration as in the NATS pod, with the output of its init container."""
    (where / "password").write_text(PASSWORD)
    (where / "nats-gate").mkdir()
    (where / "nats").mkdir()
    issuer.main(["issuer", str(where / "password"), str(where / "nats-gate/issuer.conf")])
    text = (ROOT / "k8s/base/nats/nats.conf").read_text("utf-8")
    text = text.replace("http: 8222\n", "").replace("port: 4222\n", "")
    text = re.sub(r"(pid_file|  store_dir): .*\n", "", text)
    accounts = (ROOT / "k8s/base/nats/accounts.conf").read_text("utf-8")
    assert f"include {server_conf.ISSUER_FILE}\n" in accounts
    variables = sorted(set(re.findall(r"\$(NATS_PASSWORD_\w+)", accounts)))
    passwords = "".join(f"{name}: {PASSWORD}\n" for name in variables)
    (where / "nats/accounts.conf").write_text(passwords + accounts)
    file = where / "nats/nats.conf"
    file.write_text(text)
    return file


@contextlib.asynccontextmanager
async def running(where: Path) -> AsyncIterator[tuple[local.NatsServer, processes.Process]]:
    """Run the server and the gate; yield them."""
    (where / "jwks.json").write_bytes(token_issuer.key_set(token_issuer.jwk("e1", "ES256")))
    async with local.NatsServer(where / "server", config=configuration(where)) as server:
        settings = {
            "password": f"{where}/password",
            "bus": {"url": server.url.replace("//", f"//gate:{PASSWORD}@")},
            "keys": {"file": f"{where}/jwks.json"},
            "tokens": {"issuer": token_issuer.ISSUER},
            "rates": {"messages_per_s": 50, "burst_s": 2, "read_s": 0.1},
        }
        (where / "gate.yaml").write_text(json.dumps(settings))
        program = processes.Program("g", "muster_gate", ("--config", f"{where}/gate.yaml"), {})
        gate = processes.Process(program, where / "gate.log")
        await gate.start()
        try:
            yield server, gate
        finally:
            await gate.end()


def user(
    server: local.NatsServer, name: str, password: str = PASSWORD
) -> contextlib.AbstractAsyncContextManager[bus_subjects.Client]:
    """Connect with a password."""
    url = server.url.replace("//", f"//{name}:{password}@")
    return bus_subjects.client(url, inbox_prefix=permissions.inbox(name))
