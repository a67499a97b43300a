"""Pure: imports the configuration of NVIDIA's k8s-device-plugin (v0.20), and of its iktos fork.

It reads a file of `version: v1` (api/config/v1), the flags and variables of the plugin's
containers, or both. A flag takes precedence over a variable, and a variable over the file. Settings
that NVIDIA refuses are rejected; settings that NVIDIA drops with a warning work with muster, and
are reported as differences.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from muster_plugin.config import gpus as config_gpus
from muster_plugin.config import settings
from muster_plugin.config.importers import base, iktos, nvidia_settings
from muster_plugin.model import errors

Kind = nvidia_settings.Kind

_TOP: Final = ("version", "flags", "resources", "sharing", "imex")
_SECTIONS: Final = ("flags", "flags.plugin", "flags.gfd", "imex")
_FORK: Final = ("passDeviceSpecs", "deviceListStrategy", "deviceIDStrategy")
"""Keys that the iktos fork reads below `flags`, and NVIDIA below `flags.plugin`."""
_FLAGS: Final = frozenset(flag for setting in nvidia_settings.EVERY for flag in setting.flags)
_VARIABLES: Final = frozenset(
    name for setting in nvidia_settings.EVERY for name in setting.variables
)
_ONE_DASH: Final = re.compile(r"-[a-z]{2}")
_TRUE: Final = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "false", "FALSE", "False"})
"""The texts that Go's strconv.ParseBool reads as false; `_TRUE` has those for true."""
_GENERAL: Final = (
    "an Unhealthy GPU can recover without a restart of the plugin; with NVIDIA it cannot",
    "an XID makes all affected replicas and MIG devices Unhealthy; with NVIDIA only one of them",
    (
        "a GPU that cannot be read or does not fit migStrategy is left out; "
        "NVIDIA's plugin does not start then"
    ),
)

Variables: TypeAlias = Sequence[tuple[str, str]]
_Value: TypeAlias = object
_Tree: TypeAlias = dict[str, object]


class _Source(msgspec.Struct, frozen=True):
    """A value with its flag, variable or key; `is_text` is true for flags and variables."""

    value: _Value
    path: str
    is_text: bool = True


def has_settings(
    arguments: Sequence[str], environment: Variables, elsewhere: Sequence[str] = ()
) -> bool:
    """Return whether containers' arguments or variables contain any NVIDIA setting."""
    given_names = {_dashed(argument).partition("=")[0] for argument in arguments}
    given_names |= {name for name, _ in environment} | {*elsewhere}
    return any(
        not given_names.isdisjoint([*setting.flags, *setting.variables])
        for setting in nvidia_settings.EVERY
    )


def of_process(environment: Mapping[str, str]) -> tuple[Variables, list[str]]:
    """Return the variables that can be imported, and a problem for each that cannot.

    Both lists leave out NVIDIA_VISIBLE_DEVICES, which is meant for the container runtime, and the
    variables of GPU feature discovery (`GFD_...`).
    """
    variables: list[tuple[str, str]] = []
    refused: list[str] = []
    for setting in nvidia_settings.EVERY:
        for name in setting.variables:
            value = environment.get(name, "")
            if not value or name.startswith("GFD_") or name == "NVIDIA_VISIBLE_DEVICES":
                continue
            if not setting.is_lost:
                variables.append((name, value))
            elif value not in setting.defaults:
                is_file = setting is nvidia_settings.CONFIG_FILE
                why = "pass this file with --config" if is_file else setting.instead
                refused.append(f"{name}: {errors.quoted(value)} is not supported; {why}")
    return variables, refused


def read(
    configuration: object,
    arguments: Sequence[str] = (),
    environment: Variables = (),
    elsewhere: Sequence[str] = (),
) -> base.ImportedConfiguration:
    """Return the configuration with a section `gpus`. Raises ImportRejected.

    `elsewhere` names variables whose values are unknown. A configuration that is a string has the
    iktos fork's format, `original:new:replicas,...`.
    """
    reader = base.Reader("NVIDIA")
    ours: _Tree = {}
    file: _Tree = {}
    if isinstance(configuration, str) and ":" in configuration:
        _read_fork(reader, configuration, "resource-config", ours)
    elif configuration is not None or not has_settings(arguments, environment, elsewhere):
        file = reader.mapping(configuration, "", _TOP)
        if configuration and not file and not reader.problems:
            reader.reject("", f"none of the keys of NVIDIA's file: {', '.join(_TOP)}")
    if file.get("version", "v1") != "v1":
        version = errors.quoted(file["version"])
        reader.reject("version", f"unknown version: {version}; expected v1")
    file_settings = {
        path: value for section in _SECTIONS for path, value in _keys(reader, file, section)
    }
    arguments = [*map(_dashed, arguments)]
    for setting in nvidia_settings.TABLE:
        source = _effective(reader, setting, file_settings, arguments, environment)
        if source is None:
            continue
        if setting is not nvidia_settings.CONFIG_FILE or configuration is None:
            _apply(reader, setting, source, ours)
    fork = _effective(reader, nvidia_settings.RESOURCE_CONFIG, {}, arguments, environment)
    if fork is not None:
        _read_fork(reader, str(fork.value), fork.path, ours)
    _note_unread(reader, arguments, elsewhere)
    nvidia_settings.read_sharing(reader, file.get("sharing"), ours)
    nvidia_settings.read_resources(reader, file.get("resources"), ours)
    return _imported(reader, ours)


def _note_unread(reader: base.Reader, arguments: Sequence[str], elsewhere: Sequence[str]) -> None:
    for flag in dict.fromkeys(text.partition("=")[0] for text in arguments):
        if flag.startswith("--") and flag not in _FLAGS:
            reader.note_difference(errors.quoted(flag), "not a setting of GPUs; left out")
    for variable in dict.fromkeys(elsewhere):
        if variable in _VARIABLES:
            reader.note_loss(variable, "its value is not in the manifests (valueFrom)")
        elif variable == base.ENV_FROM:
            reader.note_loss(variable, "its variables are not in the manifests")


def _imported(reader: base.Reader, ours: _Tree) -> base.ImportedConfiguration:
    if reader.problems:
        raise base.ImportRejected(reader.problems)
    try:
        gpus = msgspec.convert(ours, config_gpus.Gpus, strict=True)
        rules = settings.Document(api_version=settings.API_VERSION, gpus=gpus)
    except ValueError as error:
        raise base.ImportRejected([f"gpus: {error}".replace(" - at `$", " - at `gpus")]) from None
    reader.differences.extend(_GENERAL)
    return reader.result(rules)


def _keys(reader: base.Reader, file: _Tree, section: str) -> Iterator[tuple[str, _Value]]:
    """Yield every setting in one section of the file, each with its path."""
    value: object = file
    for word in section.split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    if value is None:
        return
    keys = _known(section)
    inner = [name.rpartition(".")[2] for name in _SECTIONS if name.startswith(f"{section}.")]
    fork = _FORK if section == "flags" else ()
    for key, setting in reader.mapping(value, section, (*keys, *inner, *fork)).items():
        if key in keys:
            yield f"{section}.{key}", setting
        elif key in fork:
            reader.note_difference(
                f"{section}.{key}",
                "imported, as the iktos fork reads it; NVIDIA reads it in flags.plugin",
            )
            yield f"{section}.plugin.{key}", setting


def _known(section: str) -> tuple[str, ...]:
    parts = (setting.key.rpartition(".") for setting in nvidia_settings.TABLE)
    return tuple(key for above, _, key in parts if above == section)


def _effective(
    reader: base.Reader,
    setting: nvidia_settings.Setting,
    file: Mapping[str, _Value],
    arguments: Sequence[str],
    environment: Variables,
) -> _Source | None:
    """Return the value that takes precedence (None: not set); report other values that differ."""
    values: list[_Source] = []
    is_switch = setting.kind is Kind.FLAG
    for flag in setting.flags:
        texts = dict.fromkeys(base.flag_values(arguments, flag, is_switch=is_switch))
        if setting.kind in {Kind.LIST, Kind.NUMBERS} and texts:
            texts = {",".join(texts): None}
        values += [_Source(value, flag) for value in texts]
    for variable in setting.variables:
        values += [_Source(text, name) for name, text in environment if name == variable]
    if file.get(setting.key) is not None:
        values.append(_Source(file[setting.key], setting.key, is_text=False))
    for other in values[1:]:
        if _plain(other.value) != _plain(values[0].value):
            winner = errors.quoted(values[0].value)
            reader.note_difference(other.path, f"{values[0].path} takes precedence, with {winner}")
    return values[0] if values else None


def _plain(value: _Value) -> str:
    """Return a value as it is written in a flag."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value).lower()


def _dashed(argument: str) -> str:
    """Return the flag with two dashes; Go also accepts one."""
    return f"-{argument}" if _ONE_DASH.match(argument) else argument


def _apply(
    reader: base.Reader, setting: nvidia_settings.Setting, source: _Source, ours: _Tree
) -> None:
    """Set muster's equivalent of a setting, or report what muster does instead."""
    before = len(reader.problems)
    value = _value(reader, setting.kind, source)
    if len(reader.problems) > before or value in setting.defaults:
        return
    if not setting.ours:
        note = reader.note_loss if setting.is_lost else reader.note_difference
        note(source.path, f"{errors.quoted(source.value)}: {setting.instead}")
        return
    if setting.values:
        words = value if isinstance(value, list) else [value]
        for word in words:
            if word not in setting.values:
                reader.reject(source.path, f"{setting.refusal}: {errors.quoted(word)}")
        if len(reader.problems) > before:
            return
        mapped = [setting.values[str(word)] for word in words]
        value = list(dict.fromkeys(mapped)) if isinstance(value, list) else mapped[0]
    if value == "packed":
        reader.note_difference(
            source.path,
            "unshared GPUs are packed too; with NVIDIA they remain aligned",
        )
    if not {"cdi-annotations", "cdi-cri"}.isdisjoint(_plain(value).split(",")):
        reader.note_loss(source.path, nvidia_settings.CDI_SPEC)
    if value not in ([], ""):
        base.put(ours, setting.ours, value)


def _value(reader: base.Reader, kind: nvidia_settings.Kind, source: _Source) -> object:
    """Return a value converted to the type that it has in the file; report any problem."""
    value, path = source.value, source.path
    match kind:
        case Kind.FLAG:
            if source.is_text and value in _TRUE | _FALSE:
                return value in _TRUE
            return reader.flag(value, path)
        case Kind.TEXT:
            return reader.text(value, path)
        case Kind.LIST:
            listed = str(value).split(",") if isinstance(value, str) else reader.items(value, path)
            trimmed = [item.strip() if isinstance(item, str) else item for item in listed]
            return [reader.text(item, f"{path}[{at}]") for at, item in enumerate(trimmed)]
        case Kind.NUMBERS:
            listed = _numbers(str(value)) if source.is_text else reader.items(value, path)
            return [reader.whole(item, f"{path}[{at}]") for at, item in enumerate(listed)]
        case Kind.ANY:
            return value


def _numbers(text: str) -> list[object]:
    """Return the numbers of a comma-separated list; other parts remain text."""
    parts = (part.strip() for part in text.strip("[]").split(","))
    return [int(p) if p.isascii() and p.isdecimal() and len(p) < 10 else p for p in parts if p]  # noqa: PLR2004  # longer ones are nonsense


def _read_fork(reader: base.Reader, text: str, path: str, ours: _Tree) -> None:
    shared, renamed = iktos.read(text, path, reader)
    if shared:
        base.put(ours, "sharing.resources", shared)
    if renamed:
        ours["resources"] = renamed
