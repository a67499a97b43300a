"""Fuzz targets for files that people write: settings of services and of other programs."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from muster.kubernetes import client
from muster.service import settings
from muster_gate import config as gate_config
from muster_health.model import config as health_config
from muster_labeler import config as labeler_config
from muster_labeler.cli import options
from muster_notifier.config import files as notifier_files
from muster_notifier.config import receiver_settings, schema
from muster_plugin.config import files
from muster_plugin.config import settings as plugin_settings
from tests.fuzz.target import in_file, split, target

_COMPOSE: Final = Path(__file__).parents[2] / "compose"
_SHAPES: Final[dict[str, Any]] = {
    "gate": gate_config.Settings,
    "health": health_config.Settings,
    "labeler": labeler_config.Settings,
    "notifier": schema.Settings,
}


def _settings() -> Iterator[bytes]:
    for name, shape in {"plugin": plugin_settings.Settings, **_SHAPES}.items():
        for file in sorted(_COMPOSE.glob(f"{name}*.yaml")):
            yield f"{name}\n".encode() + file.read_bytes()
        keys = ", ".join(field.encode_name for field in msgspec.structs.fields(shape))
        yield f"{name}\n{{{keys}}}".encode()
    yield b"gate\ntokens: {issuer: https://x, audience: muster-nats}\nkeys: {file: /k.json}\n"
    yield b"notifier\nreceivers:\n- {name: a, webhook: {url: 'https://x/'}}\nroutes:\n- matchers: ['a=~\"b\"']\n"
    yield b"notifier\nreceivers: [{name: a, email: {host: x, sender: a@b, to: [c@d], tls: none}}]\n"
    yield b"plugin\nkind: ConfigMap\napiVersion: v1\ndata:\n  c.yaml: |\n    resources: []\n"


def _resources(count: int) -> bytes:
    names = [
        {"name": f"a.com/r{n}", "groups": [{"devices": [{"path": f"/dev/r{n}"}]}]}
        for n in range(count)
    ]
    return b"plugin\n" + yaml.safe_dump({"resources": names}).encode()


@target(
    seeds=_settings,
    words=(
        *(
            "plugin\\x0a",
            "health\\x0a",
            "notifier\\x0a",
            "!!timestamp ",
            "!!float ",
            "!!int ",
            "<<: ",
        ),
        *(
            "&a",
            "*a",
            "? ",
            ": ",
            "- ",
            "|-",
            "{}",
            "[]",
            "1e999",
            "0x",
            "2026-01-02",
            "resources:",
        ),
    ),
    long=_resources,
)
def service_settings(data: bytes) -> None:
    """Check that settings are refused, each problem on one line, or survive a round trip."""
    shape, rest = split(data, {"plugin": plugin_settings.Settings, **_SHAPES})
    if shape is None:
        return
    try:
        if shape is plugin_settings.Settings:
            written_for = plugin_settings.Format.MUSTER
            read: Any = files.read(rest, source="F", written_for=written_for)
        else:
            document = settings.only(settings.parse(rest, source="F"), shape, source="F")
            read = settings.validate(shape, {} if document is None else document, source="F")
    except settings.BadSettings as refused:
        _check(refused)
        return
    printed = msgspec.yaml.encode(read)
    [tree] = settings.parse(printed, source="printed")
    assert settings.validate(shape, tree or {}) == read


def _check(refused: settings.BadSettings) -> None:
    assert refused.problems
    for problem in refused.problems:
        assert "\n" not in problem
        assert len(problem) < 4000


_PEERS: Final[dict[str, Callable[[bytes], object]]] = {
    **{
        str(form): lambda text, form=form: _imported(text, form)  # type: ignore[misc]
        for form in plugin_settings.Format
        if form is not plugin_settings.Format.MUSTER
    },
    "alertmanager": lambda text: _alertmanager(text),  # noqa: PLW0108  # defined below
}
_ALERTMANAGER: Final = b"""alertmanager
global: {smtp_smarthost: 'mail:587', smtp_from: a@example.com, resolve_timeout: 5m}
route:
  receiver: ops
  group_by: [kind]
  group_wait: 30s
  routes:
  - {matchers: ['severity="critical"'], receiver: ops, continue: true}
  - {match_re: {node: gpu-.*}, receiver: ops, mute_time_intervals: [nights]}
receivers:
- name: ops
  slack_configs: [{api_url: 'https://hooks.slack.com/services/x', channel: '#ops'}]
  webhook_configs: [{url: 'https://example.com/x', max_alerts: 5}]
  pagerduty_configs: [{routing_key: k}]
  email_configs: [{to: b@example.com}]
inhibit_rules:
- {source_matchers: ['severity="critical"'], target_matchers: ['severity="info"'], equal: [node]}
time_intervals:
- name: nights
  time_intervals:
  - {times: [{start_time: '22:00', end_time: '24:00'}], weekdays: ['monday:friday'], months: ['1:3']}
"""


def _peers() -> Iterator[bytes]:
    yield _ALERTMANAGER
    yield b"smarter\n- {devicematch: ^video[0-9]*$, nummaxdevices: 20}\n- {devicematch: ^fuse$, nummaxdevices: 1}\n"
    yield (
        b"generic\ndomain: squat.ai\ndevices:\n- name: video\n  groups:\n"
        b"  - {count: 2, paths: [{path: /dev/video*, mountPath: /dev/v, permissions: rw, limit: 3}]}\n"
        b"  - usb: [{vendor: '0x1a86', product: '7523', serial: x}]\n"
    )
    yield b"generic\ndevice: ['xy,/dev/x,/dev/y']\n"
    yield (
        b"generic\napiVersion: apps/v1\nkind: DaemonSet\nspec:\n  template:\n    spec:\n      containers:\n"
        b'      - args: [--domain=a.b, --device, "name: x1\\ngroups: [{paths: [{path: /dev/x}]}]"]\n'
    )
    yield (
        b"nvidia\nversion: v1\nflags: {migStrategy: mixed, plugin: {deviceListStrategy: envvar}}\n"
        b"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4, devices: [0, '1:0']}]}}\n"
    )
    yield (
        b"nvidia\nconfig: {default: a, map: {a: 'version: v1', b: 'version: v1'}}\n"
        b"migStrategy: single\ncdi: {featureFlags: x}\n"
    )
    yield b"nvidia\ndevicePlugin: {config: {name: c, data: {a: 'version: v1'}}}\ncdi: {enabled: true}\n"
    yield b"nvidia\nnvidia.com/gpu:nvidia.com/shared:4,nvidia.com/mig-1g.5gb:x:2\n"
    yield (
        b"nvidia\napiVersion: apps/v1\nkind: DaemonSet\nspec: {template: {spec: {containers: ["
        b"{args: [-mig-strategy, single], env: [{name: DEVICE_ID_STRATEGY, value: index}, {name: X, valueFrom: {}}]}]}}}\n"
    )


def _imported(text: bytes, form: plugin_settings.Format) -> None:
    imported = files.import_peer(text, source="F", peer=form)
    printed = msgspec.yaml.encode(imported.rules)
    files.read(printed, source="printed", written_for=plugin_settings.Format.MUSTER)
    for difference in (*imported.differences, *imported.losses):
        assert difference.isprintable(), difference


def _alertmanager(text: bytes) -> None:
    tree, _ = notifier_files.translate(text, "F")
    settings.validate(schema.Settings, tree, source="F")


@target(
    seeds=_peers,
    words=(
        *(f"{name}\\x0a" for name in _PEERS),
        *("devicematch:", "groups:", "paths:", "usb:", "timeSlicing:", "replicas:", "receivers:"),
        *("9999999999999999999999", "time_intervals:", "times:", "matchers:", "- ", ": "),
    ),
    long=lambda size: (
        b"smarter\n"
        + b"".join(b"- {devicematch: ^a%d$, nummaxdevices: 1}\n" % n for n in range(size))
    ),
)
def dialects(data: bytes) -> None:
    """Check that a file of another program is refused, or its translation is valid for muster."""
    read, rest = split(data, _PEERS)
    if read is None:
        return
    try:
        read(rest)
    except settings.BadSettings as refused:
        _check(refused)


_SECRET: Final = receiver_settings.Secret(file="F", at="receivers.0.slack_configs.0.api_url")
_KUBECONFIG: Final = b"""apiVersion: v1
kind: Config
current-context: c
clusters:
- {name: c, cluster: {server: "https://127.0.0.1:6443", certificate-authority-data: Y2E=}}
contexts:
- {name: c, context: {cluster: c, user: u, namespace: muster}}
users:
- {name: u, user: {token: abc, client-certificate-data: Yw==, client-key-data: aw==}}
"""
_RUNS_PROGRAMS: Final = (b"exec", b"provider", b"\\", b"ile")
"""A kubeconfig may name programs to run and files to read, which mutated input must not do."""


@target(
    seeds=lambda: iter((_KUBECONFIG, (_COMPOSE / "kubeconfig").read_bytes())),
    words=("clusters:", "contexts:", "users:", "current-context:", "server:", "token:", "- ", ": "),
)
def kubeconfigs(data: bytes) -> None:
    """Check that a kubeconfig is read, or refused with a message of one line."""
    if any(word in data for word in _RUNS_PROGRAMS):
        return
    try:
        asyncio.run(client.where(kubeconfig=os.fspath(in_file(data)), context=None, timeout_s=1.0))
    except client.NoCluster as refused:
        assert "\n" not in str(refused)


@target(
    seeds=lambda: iter((_ALERTMANAGER.partition(b"\n")[2], b"{'NVIDIA X1': nvidia-x1}", b"a: b")),
    words=("!!timestamp ", "!!int ", "&a", "*a", "- ", ": ", "receivers:", "slack_configs:"),
)
def yaml_values(data: bytes) -> None:
    """Check that a secret in a YAML file, and a file of product names, are read or refused."""
    file = in_file(data)
    try:
        notifier_files.secret(msgspec.structs.replace(_SECRET, file=os.fspath(file)))
    except notifier_files.NoSecret as refused:
        assert len(str(refused)) < 300
    try:
        options.aliases(file)
    except options.UsageError as refused:
        assert "\n" not in str(refused)
