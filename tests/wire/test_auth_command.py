"""`muster auth` as people run it: keys, credentials, certificates, and errors."""

import asyncio
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from muster import vocabulary
from muster.cli import auth, keyfiles
from muster.local import nats
from muster.nats import bus, connection
from tests.worlds import bus_subjects, manifests, nats_with_gate

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ran(capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = auth.app([*map(str, arguments)], result_action="return_value")
        output = capfd.readouterr()
        return code, output.out, output.err

    return run


def test_a_reader_runs_the_program_that_was_printed_with_the_file_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: Run
) -> None:
    keys, ca = tmp_path / "keys", tmp_path / "ca"
    assert ran("init", keys)[0] == 0
    assert ran("local-ca", ca)[0] == 0
    config = nats_with_gate.configured(keys, tmp_path)
    tls = (nats_with_gate.ROOT / "k8s/overlays/production/nats.conf").read_text()
    objects = re.search(r"(?ms)^tls \{.*?^\}\n", tls)
    assert objects is not None
    config.write_text(config.read_text() + objects[0].replace("/etc/nats-tls", str(ca)))
    port = nats.free_port()
    creds, url = tmp_path / "grafana.creds", f"tls://localhost:{port}"
    code, program, errors = ran(
        "reader", "--name", "grafana", "--out", creds, "--url", url, "--keys", keys
    )
    assert (code, errors) == (0, "")
    assert len([line for line in program.splitlines() if not line.startswith("#")]) == 5
    assert program.startswith(f"# NATS_CREDS={creds} NATS_CA=ca.crt python this.py\n")

    async def story() -> None:
        async with (
            asyncio.timeout(100),
            nats.NatsServer(tmp_path / "nats", port=port, config=config),
        ):
            # a connection to nats-server begins in plain text; the server then requires TLS
            monkeypatch.setenv("NATS_CREDS", str(keys / "health.creds"))
            monkeypatch.setenv("NATS_CA", str(ca / "ca.crt"))
            listening = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", program),
                env=os.environ | {"NATS_CREDS": str(creds)},
                stdout=asyncio.subprocess.PIPE,
            )
            async with bus.Bus(url, producer="t", name="t", owner=True) as health:
                assert listening.stdout is not None
                expected = asyncio.create_task(listening.stdout.readline())
                while not expected.done():
                    await health.publish(tick())
                    await asyncio.wait([expected], timeout=0.2)
                assert b"watchdog.ticked" in await expected
            listening.terminate()
            await listening.communicate()

    asyncio.run(story())


def tick() -> vocabulary.Event:
    return vocabulary.WatchdogTicked(
        node=vocabulary.FLEET, at=datetime.now(UTC), holder="t", leader=1, interval_s=10.0
    )


def test_keys_are_readable_by_their_owner_only_and_never_overwritten(
    tmp_path: Path, ran: Run
) -> None:
    keys = tmp_path / "keys"
    code, output, _ = ran("init", keys)
    assert code == 0
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in keys.iterdir()} == {0o600}
    seeds = {file.name: file.read_text() for file in keys.glob("*.seed")}
    assert not any(seed.strip() in output for seed in seeds.values())
    code, _, errors = ran("init", keys)
    assert (code, errors.count("\n")) == (2, 1)
    assert "already has keys" in errors
    assert {file.name: file.read_text() for file in keys.glob("*.seed")} == seeds


def test_the_printed_commands_create_what_production_mounts(tmp_path: Path, ran: Run) -> None:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or "kubectl"
    made = tmp_path / "made.yaml"
    stand_in = tmp_path / "kubectl"
    applies = f"cat >> {made}; echo --- >> {made}"
    stand_in.write_text(f'#!/bin/sh\ncase "$1" in apply) {applies};; *) {kubectl} "$@";; esac\n')
    stand_in.chmod(0o700)
    _, keys, _ = ran("init", tmp_path / "two words")
    _, tls, _ = ran("local-ca", tmp_path / "its tls")
    script = "\n".join(output[output.index("into()") :] for output in (keys, tls))
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["/bin/sh", "-e"], input=script, text=True, env={"PATH": path}, check=True)
    objects = {
        (document["kind"], document["metadata"]["namespace"], document["metadata"]["name"]): set(
            document["data"]
        )
        for document in yaml.safe_load_all(made.read_text())
        if document
    }
    assert "ca.key" not in made.read_text()
    assert objects == {
        ("ConfigMap", "muster", "muster-accounts"): {"accounts.conf"},
        ("Secret", "muster", "muster-gate"): {"gate.json", "gate.creds"},
        **{
            ("Secret", "muster", f"muster-{who}-creds"): {"nats.creds"}
            for who in (*manifests.CENTRAL, "console")
        },
        ("Secret", "muster", "muster-nats-tls"): {"tls.crt", "tls.key", "ca.crt"},
        ("ConfigMap", "muster", "muster-nats-ca"): {"ca.crt"},
    }
    mounted = {
        (kind, name)
        for pod in manifests.pods("production").values()
        for volume in pod["volumes"]
        for source in (volume, *volume.get("projected", {}).get("sources", ()))
        for kind, key in (("ConfigMap", "configMap"), ("Secret", "secret"))
        if key in source and not source[key].get("optional")
        for name in [source[key].get("name") or source[key]["secretName"]]
    }
    rendered = {(o["kind"], o["metadata"]["name"]) for o in manifests.objects("production")}
    # mounted by the console, which is a component
    mounted.add(("Secret", "muster-console-creds"))
    assert mounted - rendered == {(kind, name) for kind, _, name in objects}


def test_a_key_is_rotated_in_two_steps(tmp_path: Path, ran: Run) -> None:
    keys = tmp_path / "keys"
    ran("init", keys)
    before = (keys / "node.seed").read_text()
    code, output, _ = ran("rotate", "node", "--keys", keys)
    assert (code, output.splitlines()[-1]) == (
        0,
        f"Finally: muster auth rotate node --drop --keys {keys}",
    )
    # NATS must know the new key before a client presents a credential that the key signed
    order = [line.split("/")[0].split(" --from")[0] for line in output.splitlines()[4:8]]
    assert order == [
        "into configmap muster-accounts",
        "kubectl -n muster rollout restart statefulset",
        "kubectl -n muster rollout status statefulset",
        "into secret generic muster-gate",
    ]
    assert (keys / "node.seed").read_text().endswith(before)
    new = (keys / "node.seed").read_text().split()[0]
    assert new in (keys / "gate.json").read_text()
    assert ran("rotate", "node", "--drop", "--keys", keys)[0] == 0
    assert (keys / "node.seed").read_text().split() == [new]


def test_an_older_directory_gets_the_key_of_a_new_role_and_no_other(
    tmp_path: Path, ran: Run
) -> None:
    keys = tmp_path / "keys"
    ran("init", keys)
    for name in ("console.seed", "console.creds"):
        (keys / name).unlink()
    older = {file.name: file.read_text() for file in keys.glob("*.seed")}
    code, output, _ = ran("accounts", "--keys", keys)
    assert (code, f"muster-console-creds --from-file=nats.creds={keys}" in output) == (0, True)
    new = {file.name: file.read_text() for file in keys.glob("*.seed")}
    assert new == older | {"console.seed": new["console.seed"]}
    assert stat.S_IMODE((keys / "console.seed").stat().st_mode) == 0o600
    assert ran("rotate", "console", "--keys", keys)[0] == 0
    assert len((keys / "console.seed").read_text().split()) == 2
    (keys / "reader.seed").unlink()
    code, _, errors = ran("accounts", "--keys", keys)
    assert (code, "reader.seed: does not exist" in errors) == (2, True)


def test_a_certificate_is_renewed_by_the_same_authority_and_never_by_mistake(
    tmp_path: Path, ran: Run
) -> None:
    where = tmp_path / "tls"
    assert ran("local-ca", where, "--valid", "1d")[0] == 0
    before = {file.name: file.read_bytes() for file in where.iterdir()}
    code, output, errors = ran("local-ca", where)
    assert (code, output, "already has ca.crt" in errors) == (2, "", True)
    assert {file.name: file.read_bytes() for file in where.iterdir()} == before
    code, output, _ = ran("local-ca", where, "--renew")
    assert (code, output.splitlines()[-2:]) == (
        0,
        [
            f"kubectl -n muster rollout {act} statefulset/muster-nats"
            for act in ("restart", "status")
        ],
    )
    after = {file.name: file.read_bytes() for file in where.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"tls.crt", "tls.key"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in where.iterdir()} == {0o600}
    authority, issued = (
        x509.load_pem_x509_certificate(after[name]) for name in ("ca.crt", "tls.crt")
    )
    issued.verify_directly_issued_by(authority)
    assert authority.not_valid_after_utc > issued.not_valid_after_utc
    assert issued.not_valid_after_utc > datetime.now(UTC) + timedelta(days=3_000)
    code, _, errors = ran("local-ca", tmp_path / "none", "--renew")
    assert (code, "ca.key" in errors) == (2, True)


def test_a_file_of_credentials_is_readable_by_its_owner_only(tmp_path: Path, ran: Run) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o755)
    ran("init", keys)
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    for command in (("node", "node-a"), ("reader", "--name", "grafana")):
        file = tmp_path / f"{command[0]}.creds"
        file.touch(mode=0o644)
        code, output, _ = ran(*command, "--out", file, "--keys", keys)
        assert (code, "BEGIN" in output) == (0, False)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert "BEGIN NATS USER JWT" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("node", "node-a"), ".seed: does not exist; create all keys with `muster auth init"),
        (("node", "Not_A_Node"), "is not a Kubernetes node name"),
        (("node", "_fleet"), "is not a node's token"),
        (
            ("node", "node-a", "--valid", "soon"),
            "--valid: 'soon' is not a duration such as 12h, 30d or 1y",
        ),
        (("node", "node-a", "--valid", "99y"), "at most 10y"),
        (("reader", "--name", "two words"), "letters, digits, '-' and '_'"),
        (("reader", "--name", ""), "--name: must not be empty"),
        (("rotate", "operator"), "'operator': must be one of answer, node, reader"),
        (("local-ca", "/proc/nowhere"), "/proc/nowhere"),
        (("local-ca", "x", "--host", "ä ö"), "--host"),
        (("init", ""), "choose a separate directory"),
        (("local-ca", "."), "choose a separate directory"),
        (("init", "/tmp"), "/tmp: other users can write to it"),
        (("local-ca", "/proc/self/nothing", "--renew"), "ca.key: No such file"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ran: Run,
    arguments: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.setenv("MUSTER_AUTH_KEYS", str(tmp_path / "none"))
    code, output, errors = ran(*arguments)
    assert (code, output, errors.count("\n")) == (2, "", 1)
    assert errors.startswith(f"muster auth {arguments[0]}: ")
    assert expected in errors


def test_a_bad_seed_is_named_and_not_repeated(tmp_path: Path, ran: Run) -> None:
    keys = tmp_path / "keys"
    ran("init", keys)
    seed = (keys / "reader.seed").read_text()
    (keys / "reader.seed").write_text(seed.replace(seed[9], "A" if seed[9] != "A" else "B"))
    code, _, errors = ran("reader", "--name", "x", "--keys", keys)
    assert (code, errors) == (
        2,
        f"muster auth reader: {keys}/reader.seed: not a key, because its checksum is wrong\n",
    )


def test_a_client_trusts_a_new_authority_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, believed = tmp_path / "served", tmp_path / "believed"
    config, port = tmp_path / "nats.conf", nats.free_port()
    files = f'cert_file: "{served}/tls.crt", key_file: "{served}/tls.key"'
    config.write_text(f"tls {{ {files} }}\n")
    monkeypatch.setenv("NATS_CA", str(believed / "ca.crt"))

    def certify(where: Path) -> None:
        shutil.rmtree(where, ignore_errors=True)
        keyfiles.make_certificates(
            where, ["localhost"], at=datetime.now(UTC), lasts=timedelta(days=1)
        )

    async def story() -> None:
        server = nats.NatsServer(tmp_path / "nats", port=port, config=config)
        async with (
            asyncio.timeout(100),
            server,
            connection.Connection(f"tls://localhost:{port}", name="t") as link,
        ):
            for epoch in (1, 2):
                before = distrusted()
                await bus_subjects.until(lambda: distrusted() > before, limit_s=30)  # noqa: B023
                assert not link.is_connected
                shutil.copy(served / "ca.crt", believed / "ca.crt")
                await bus_subjects.until(lambda: link.is_connected, limit_s=30)
                assert link.epoch == epoch
                shown = x509.load_pem_x509_certificate((served / "tls.crt").read_bytes())
                assert (
                    connection._CERTIFICATE_ENDS._value.get()
                    == shown.not_valid_after_utc.timestamp()
                )
                if epoch == 1:
                    certify(served)
                    await server.stop()
                    await server.start()

    def distrusted() -> float:
        return float(connection._ERRORS.labels("SSLCertVerificationError")._value.get())

    certify(served)
    certify(believed)
    asyncio.run(story())
