"""Pure: reads the Helm values of other device plugins' charts, as those charts do.

NVIDIA's chart nvidia-device-plugin (v0.20; values.yaml, daemonset-device-plugin.yml) sets a
variable only for a value of the right type. NVIDIA's chart gpu-operator and its ClusterPolicy, in
`spec`, share the keys devicePlugin, mig and cdi; the operator's DaemonSet sets PASS_DEVICE_SPECS
itself. In the chart of smarter-device-manager, `config` is the list of devices.
"""

from collections.abc import Mapping
from typing import Final

from muster_plugin.config.importers import base
from muster_plugin.model import errors

_TEXTS: Final = {
    "migStrategy": "MIG_STRATEGY",
    "deviceListStrategy": "DEVICE_LIST_STRATEGY",
    "deviceIDStrategy": "DEVICE_ID_STRATEGY",
    "nvidiaDriverRoot": "NVIDIA_DRIVER_ROOT",
    "nvidiaDevRoot": "NVIDIA_DEV_ROOT",
    "deviceDiscoveryStrategy": "DEVICE_DISCOVERY_STRATEGY",
}
_FLAGS: Final = {
    "failOnInitError": "FAIL_ON_INIT_ERROR",
    "compatWithCPUManager": "PASS_DEVICE_SPECS",
    "gdrcopyEnabled": "GDRCOPY_ENABLED",
    "gdsEnabled": "GDS_ENABLED",
    "mofedEnabled": "MOFED_ENABLED",
}
_CDI: Final = {"nvidiaHookPath": "NVIDIA_CDI_HOOK_PATH", "featureFlags": "CDI_FEATURE_FLAGS"}
_OF_FILE: Final = frozenset({"version", "flags", "sharing", "imex"})
"""Keys of NVIDIA's file that do not exist in the values of the charts."""
_OF_PODS: Final = ("nodeSelector", "affinity", "tolerations", "runtimeClassName")
_OPERATOR_STRATEGY: Final = "single"


def of_nvidia(document: object) -> base.ManifestContent | None:
    """Return the configuration in the values of NVIDIA's charts; None for other documents."""
    if not isinstance(document, Mapping):
        return None
    if not _OF_FILE.isdisjoint(document):
        return None
    if isinstance(document.get("devicePlugin"), Mapping) and "config" not in document:
        return of_operator(document)
    if not {"config", *_TEXTS, *_FLAGS}.isdisjoint(document):
        return _of_chart(document)
    return None


def smarter_list(document: object) -> object:
    """Return the list in smarter-device-manager's Helm values; return other documents unchanged."""
    if isinstance(document, Mapping) and isinstance(document.get("config"), list):
        return document["config"]
    return document


def of_operator(spec: Mapping[object, object]) -> base.ManifestContent:
    """Return the configuration in the GPU operator's values, or in a ClusterPolicy's `spec`."""
    plugin, reader = _section(spec, "devicePlugin"), base.Reader("the GPU operator")
    strategy = _section(spec, "mig").get("strategy")
    if not isinstance(strategy, str) or not strategy:
        strategy = _OPERATOR_STRATEGY
        reader.note_difference("mig.strategy", f"missing; {strategy} is the operator's default")
    environment = [("PASS_DEVICE_SPECS", "true"), ("MIG_STRATEGY", strategy)]
    given = [*base.variables(plugin)]
    names = {name for name, _ in given}
    environment = [pair for pair in environment if pair[0] not in names] + given
    if _section(spec, "cdi").get("enabled") is True and "DEVICE_LIST_STRATEGY" not in names:
        text = "the operator passes GPUs to containers by CDI; set gpus.given.deviceList"
        reader.note_loss("cdi.enabled", text)
    return _content(reader, _section(plugin, "config"), "data", "devicePlugin.config", environment)


def _of_chart(values: Mapping[object, object]) -> base.ManifestContent:
    reader = base.Reader("NVIDIA's chart")
    environment: list[tuple[str, str]] = []
    cdi = {f"cdi.{key}": name for key, name in _CDI.items()}
    plain = dict(values)
    plain.update((f"cdi.{key}", value) for key, value in _section(values, "cdi").items())
    for key, name in {**_TEXTS, **_FLAGS, **cdi}.items():
        value, kind = plain.get(key), bool if key in _FLAGS else str
        if isinstance(value, kind):
            environment.append((name, str(value).lower() if kind is bool else str(value)))
        elif value is not None:
            words = (
                f"{errors.quoted(value)} is not {'true or false' if kind is bool else 'a string'}"
            )
            reader.note_difference(key, f"{words}; NVIDIA's chart ignores it")
    for key in _OF_PODS:
        if values.get(key):
            reader.note_difference(key, "belongs in the values of muster's chart")
    return _content(reader, _section(values, "config"), "map", "config", environment)


def _content(
    reader: base.Reader,
    config: Mapping[object, object],
    key: str,
    path: str,
    environment: list[tuple[str, str]],
) -> base.ManifestContent:
    files = [
        (str(name), text) for name, text in _section(config, key).items() if isinstance(text, str)
    ]
    name = config.get("name")
    if name and not files:
        text = f"the ConfigMap {errors.quoted(name)} is missing: add its manifest"
        reader.note_loss(f"{path}.name", text)
    default = config.get("default")
    return base.ManifestContent(
        files=tuple(files),
        devices=(),
        domain=None,
        environment=tuple(environment),
        default=default if isinstance(default, str) else "",
        differences=tuple(reader.differences),
        losses=tuple(reader.losses),
    )


def _section(values: Mapping[object, object], key: str) -> Mapping[object, object]:
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}
