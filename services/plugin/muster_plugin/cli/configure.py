"""Adapter for the command line `muster config`: validate, show, schema, import, daemonsets.

Exit codes: 0 if the file can be used, 1 if an import would lose settings, 2 if the file cannot be
used (one line for each problem on stderr). The output on stdout can be saved as a file; hints for
people go to stderr.
"""

import asyncio
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, ParamSpec

import cyclopts
import msgspec
from cyclopts import Parameter

from muster import vocabulary, wording
from muster.cli import output
from muster.service import settings, validation
from muster_plugin.config import daemonsets, files, gpus
from muster_plugin.config import settings as config_settings
from muster_plugin.discovery import devfs, resource_plan
from muster_plugin.gpu import evaluation, replicas, simulated, xid_policy
from muster_plugin.gpu.nvml import observer
from muster_plugin.model import advertised, gpu

_Arguments = ParamSpec("_Arguments")
_BYTES_MAX: Final = 1024 * 1024 + 1

app = cyclopts.App(
    name="config",
    help="Check, show and import the device configuration.",
    version_flags=[],
)


def _refuse_option(_: type, file: str) -> None:
    if file.startswith("-") and file != "-":
        raise ValueError(f"unknown option: {file}")


_File = Annotated[
    str,
    Parameter(
        name="FILE",
        # for a file called `-`
        allow_leading_hyphen=True,
        validator=_refuse_option,
        help="A YAML file, or a manifest that contains one; - is stdin.",
    ),
]
_Manifests = Annotated[
    str,
    Parameter(
        name="MANIFESTS",
        allow_leading_hyphen=True,
        validator=_refuse_option,
        help="The plugin's DaemonSet, as `kubectl get daemonset NAME -o yaml` prints it, or all "
        "manifests of muster, as `kubectl kustomize DIR` prints them: other objects are printed "
        "unchanged; - is stdin.",
    ),
]
_Domain = Annotated[str | None, Parameter(help="The domain of generic-device-plugin's resources.")]
_Default = Annotated[
    str,
    Parameter(
        show_default=False,
        help="Which of NVIDIA's configurations applies to nodes whose labels select none.",
    ),
]


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options that `validate` and `show` share."""

    format: Annotated[
        config_settings.Format, Parameter(help="The plugin for which the file is written.")
    ] = config_settings.Format.MUSTER
    domain: _Domain = None
    default: _Default = ""
    node: Annotated[str, Parameter(show_default=False, help="The name of the node.")] = ""
    label: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", show_default=False, help="A label of the node, KEY=VALUE; can be repeated."
        ),
    ] = ()
    kubelet_directory: Annotated[
        str,
        Parameter(show_default=False, help="The kubelet's directory; overrides kubelet.directory."),
    ] = ""


_DEFAULTS: Final = Options()


def _reporting(command: Callable[_Arguments, int | None]) -> Callable[_Arguments, int]:
    """Wrap a command so that it prints its problems and returns the exit code."""

    @functools.wraps(command)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> int:
        try:
            return command(*arguments, **options) or 0
        except settings.BadSettings as error:
            for problem in error.problems:
                output.warn("config", problem)
            return 2

    return run


@app.command
@_reporting
def validate(file: _File, /, options: Options = _DEFAULTS) -> None:
    """Check whether a file can be used, and print every problem."""
    configuration = _read(file, options)
    on_node = _on_node(file, options, configuration)
    gpu_warnings = [*xid_policy.warnings(configuration.gpus)]
    for number, node in enumerate(configuration.nodes):
        texts = xid_policy.warnings(node.gpus or None)
        gpu_warnings += (f"nodes[{number}].{text}" for text in texts)
    rule_warnings = config_settings.warnings(configuration.resources, configuration.nodes)
    for warning in (*rule_warnings, *gpu_warnings):
        output.warn("config", f"{file}: warning: {warning}")
    summary = _counted(on_node)
    if configuration.nodes and not (options.node or options.label):
        summary += " by default; to show a node with overrides, use `show` with --node or --label"
    elif options.node:
        summary += f" on {options.node}"
    output.show(f"{file}: can be used; {summary}")


@app.command
@_reporting
def show(
    file: _File,
    /,
    options: Options = _DEFAULTS,
    *,
    matches: Annotated[
        bool,
        Parameter(
            negative="", show_default=False, help="Show which devices of this machine match."
        ),
    ] = False,
) -> None:
    """Print the configuration of one node."""
    configuration = _read(file, options)
    on_node = _on_node(file, options, configuration)
    if on_node == config_settings.NodeConfiguration():
        output.show("# nothing on this node")
    elif matches:
        _show_matches(on_node, configuration.simulated_gpus, options.node or configuration.node)
    else:
        _print_yaml(
            config_settings.Document(
                api_version=config_settings.API_VERSION,
                resources=on_node.resources,
                gpus=on_node.gpus,
            )
        )
        for warning in xid_policy.warnings(on_node.gpus):
            output.warn("config", f"{file}: warning: {warning}")


@app.command(name="schema")
def print_schema() -> int:
    """Print the JSON Schema of the configuration, for editors."""
    output.print_json(schema(), indent=2)
    return 0


@app.command(name="import")
@_reporting
def import_file(
    file: _File,
    /,
    *,
    peer: Annotated[
        Literal["smarter", "generic", "nvidia"],
        Parameter(name="--from", help="The plugin for which the file is written."),
    ],
    domain: _Domain = None,
    default: _Default = "",
    accept_losses: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Print the configuration even if settings are lost.",
        ),
    ] = False,
) -> int:
    """Convert another plugin's configuration; differences and losses go to stderr."""
    form = config_settings.Format(peer)
    imported = files.import_peer(
        _text(file),
        source=file,
        peer=form,
        domain=_checked_domain(domain, form),
        default=_checked_default(default, form),
    )
    for difference in imported.differences:
        output.warn("config", f"difference: {difference}")
    if not output.may_write("config", imported.losses, accepted=accept_losses):
        return 1
    _print_yaml(imported.rules)
    return 0


@app.command(name="daemonsets")
@_reporting
def print_daemonsets(file: _File, manifests: _Manifests, /) -> None:
    """Print muster's DaemonSet, and another for each label value in the file's `nodes`."""
    configuration = _read(file, _DEFAULTS)
    objects = daemonsets.objects_of(settings.parse(_text(manifests), source=manifests))
    plugins = daemonsets.plugins_of(objects)
    if len(plugins) != 1:
        problem = f"found {len(plugins)} DaemonSets that run muster_plugin; expected one"
        raise settings.BadSettings([f"{manifests}: {problem}"])
    try:
        made = daemonsets.for_labels(configuration, plugins[0])
    except validation.Refused as error:
        raise settings.BadSettings([f"{file}: {problem}" for problem in error.problems]) from None
    at = objects.index(plugins[0])
    items = [*objects[:at], *made, *objects[at + 1 :]]
    output.print_yaml({"apiVersion": "v1", "kind": "List", "items": items})
    names = [daemonsets.plugin_name(each) for each in made[1:]]
    for plugin, each in zip(names, made[1:], strict=True):
        entry = f"{{plugin: {plugin}, {daemonsets.name_of(each)}}}"
        output.warn("config", f"add to health's cluster.plugins: {entry}")
    listed = msgspec.json.encode(names).decode()
    output.warn("config", f"set the gate's variable MUSTER_GATE__PLUGINS to '{listed}'")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the plugin's configuration file, for editors."""
    generated = msgspec.json.schema(config_settings.Settings)
    for definition in generated["$defs"].values():
        if "properties" in definition:
            # the loader rejects unknown keys; msgspec's schemas allow them
            definition["additionalProperties"] = False
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://muster.dev/schemas/v1/config.json",
        **generated,
    }


def _counted(on_node: config_settings.NodeConfiguration) -> str:
    count = len(on_node.resources)
    resources = wording.counted(count, "resource") if count else "no resources"
    if on_node.gpus:
        return f"{resources} and GPUs" if count else "GPUs"
    return resources if count else "nothing"


def _read(file: str, options: Options) -> config_settings.Settings:
    """Read the configuration file; the options may replace its kubelet directory and labels."""
    configuration = files.read(
        _text(file),
        source=file,
        written_for=options.format,
        domain=_checked_domain(options.domain, options.format),
        default=_checked_default(options.default, options.format),
    )
    labels = dict(_label(text) for text in options.label)
    try:
        kubelet = config_settings.Kubelet(
            directory=options.kubelet_directory or configuration.kubelet.directory
        )
        return msgspec.structs.replace(
            configuration, kubelet=kubelet, labels=labels or configuration.labels
        )
    except validation.Refused as error:
        texts = [problem.removeprefix("kubelet.") for problem in error.problems]
        problems = [f"--kubelet-directory: {text.removeprefix('directory: ')}" for text in texts]
        raise settings.BadSettings(problems) from None


def _on_node(
    file: str, options: Options, configuration: config_settings.Settings
) -> config_settings.NodeConfiguration:
    """Return the configuration of the node named in the options or the file, or of an unnamed node.

    Raises BadSettings.
    """
    name = options.node or configuration.node
    try:
        node = msgspec.convert(name or "any", vocabulary.NodeName)
        return configuration.at(node if name else "")
    except msgspec.ValidationError:
        problem = f"--node: {validation.quoted(options.node)} is not a Kubernetes node name"
        raise settings.BadSettings([problem]) from None
    except validation.Refused as error:
        where = f" on {options.node}" if options.node else ""
        problems = [f"{file}{where}: {problem}" for problem in error.problems]
        raise settings.BadSettings(problems) from None


def _checked_domain(domain: str | None, form: config_settings.Format) -> str | None:
    if domain and form is not config_settings.Format.GENERIC:
        raise settings.BadSettings(["--domain: applies only to resources of generic-device-plugin"])
    return domain or None


def _checked_default(default: str, form: config_settings.Format) -> str:
    if default and form is not config_settings.Format.NVIDIA:
        raise settings.BadSettings(["--default: applies only to configurations of NVIDIA's plugin"])
    return default


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise settings.BadSettings([f"--label: {text!r} is not KEY=VALUE"])
    return key, value


def _text(file: str) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(_BYTES_MAX)
        with Path(file).open("rb") as opened:
            return opened.read(_BYTES_MAX)
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise settings.BadSettings([f"{file}: {problem}"]) from None


def _print_yaml(configuration: config_settings.Document) -> None:
    output.print_yaml(configuration)


def _show_matches(
    on_node: config_settings.NodeConfiguration,
    fake: config_settings.SimulatedGpus | None,
    node: str,
) -> None:
    """Scan this machine once, as the plugin does, and print the devices that match the rules."""
    entries = [nodes for resource in on_node.resources for _, nodes in resource.entries()]
    plan = resource_plan.plan(on_node.resources, devfs.scan(entries).result)
    present: tuple[vocabulary.Gpu, ...] = ()
    if on_node.gpus is not None:
        scan = asyncio.run(_scan_gpus(on_node.gpus, fake, node))
        present = scan.gpus
        plan = resource_plan.merged(plan, replicas.plan(scan, on_node.gpus))
    rows = [("RESOURCE", "DEVICE", "GIVES")]
    for planned in plan.resources:
        rows += [*_rows(planned, present)] or [(planned.name, "-", "no device")]
    output.show(*output.aligned(rows))
    for problem in plan.problems:
        output.warn("config", problem)


async def _scan_gpus(
    rules: gpus.Gpus, fake: config_settings.SimulatedGpus | None, node: str
) -> gpu.Scan:
    source: evaluation.Source = (
        simulated.SimulatedSource(fake, node, poll_s=rules.health.poll_s)
        if fake
        else observer.NvmlSource(rules)
    )
    try:
        return await source.first_scan(evaluation.FIRST_SCAN_S)
    finally:
        await source.close()


def _rows(
    planned: resource_plan.PlannedResource, present: Iterable[vocabulary.Gpu]
) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each physical device, with the id of its first unit."""
    devices: dict[str, list[advertised.Unit]] = {}
    for unit in planned.units:
        devices.setdefault(unit.physical, []).append(unit)
    descriptions = {uuid: text for gpu in present for uuid, text in _described(gpu).items()}
    for physical, units in devices.items():
        more = f" and {len(units) - 1} more" if len(units) > 1 else ""
        paths = [device.host_path for device in units[0].devices]
        paths += [mount.host_path for mount in units[0].mounts]
        description = descriptions.get(physical) or ", ".join(paths)
        yield planned.name, f"{units[0].id}{more}", description


def _described(gpu: vocabulary.Gpu) -> Mapping[str, str]:
    """Return descriptions of a GPU and of its MIG devices, by uuid."""
    which = f"GPU {gpu.index}" if gpu.index is not None else "a GPU"
    parts = {mig.uuid: f"{mig.profile} of {which}, {gpu.product}" for mig in gpu.mig}
    return {gpu.uuid: f"{which}, {gpu.product}", **parts}
