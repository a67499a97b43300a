"""Pure: what all importers share: reads values as the other plugin does, reports ignored keys.

A problem is a setting that the other plugin refuses too, or that has a different meaning in muster.
A loss is behaviour of the other plugin that muster does not reproduce, such as writing a CDI spec
for GPUs. A difference is a setting that works, but not in exactly the same way. The configuration
may be inside the Kubernetes manifests that deploy the plugin: in a ConfigMap, or in the arguments
and variables of a DaemonSet.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from muster.service import validation
from muster_plugin.config import resources, settings
from muster_plugin.model import errors

_MEANT: Final = "; did you mean "
_NEAR: Final = 0.6
_NAME_MAX: Final = 60
ENV_FROM: Final = "envFrom"
"""Stands for all variables of a ConfigMap or Secret."""
_ITEMS_MAX: Final = 1_000
_DEFAULT: Final = "DEFAULT_CONFIG"
"""The variable of NVIDIA's config-manager that names the default configuration."""


class ImportRejected(ValueError):
    """The configuration cannot be imported; `problems` has one line for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ImportedConfiguration(msgspec.Struct, frozen=True, kw_only=True):
    """Another plugin's configuration, converted to muster's."""

    rules: settings.Document
    differences: tuple[str, ...]
    losses: tuple[str, ...] = ()


class Reader:
    """Reads one file, and collects its problems, losses and differences."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self.problems: list[str] = []
        self.differences: list[str] = []
        self.losses: list[str] = []
        self._noted: set[str] = set()

    def reject(self, path: str, problem: str) -> None:
        """Record why the file cannot be imported; an empty path means the whole file."""
        self.problems.append(_printable(f"{path}: {problem}" if path else problem))

    def note_difference(self, path: str, difference: str) -> None:
        """Record, once, a difference between the behaviour of the two plugins."""
        line = _printable(f"{path}: {difference}")
        if line not in self._noted:
            self._noted.add(line)
            self.differences.append(line)

    def note_loss(self, path: str, loss: str) -> None:
        """Record, once, behaviour of the other plugin that muster will not reproduce."""
        line = _printable(f"{path}: {loss}")
        if line not in self.losses:
            self.losses.append(line)

    def mapping(self, value: object, path: str, keys: Sequence[str]) -> dict[str, object]:
        """Return the known entries of a mapping; report the other keys, which the peer ignores too.

        A value that is not a mapping is rejected.
        """
        if not isinstance(value, Mapping):
            self.reject(path, f"expected a mapping of keys, found {errors.quoted(value)}")
            return {}
        entries: dict[str, object] = {}
        for key, inner in value.items():
            if isinstance(key, str) and key in keys:
                entries[key] = inner
                continue
            name = key if isinstance(key, str) and key.isprintable() else errors.quoted(key)
            where = f"{path}.{name[:_NAME_MAX]}".removeprefix(".")
            hint = validation.near(name, keys, _NEAR)
            self.note_difference(where, f"{self._peer} ignores this key{hint and f'; {hint}'}")
        return entries

    def items(self, value: object, path: str) -> list[object]:
        """Return a list, or an empty list for None; reject any other value."""
        if value is None:
            return []
        if isinstance(value, list):
            return value
        self.reject(path, f"expected a list, found {errors.quoted(value)}")
        return []

    def text(self, value: object, path: str) -> str:
        """Return a string, or an empty string for None; reject any other value."""
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        self.reject(path, f"expected a string; write {errors.quoted(value)} in quotes")
        return ""

    def whole(self, value: object, path: str) -> int:
        """Return a non-negative integer, or 0 for None; reject any other value."""
        if value is None:
            return 0
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self.reject(path, f"expected a whole number of at least 0, found {errors.quoted(value)}")
        return 0

    def flag(self, value: object, path: str) -> bool:
        """Return a boolean, or False for None; reject any other value."""
        if value is None or isinstance(value, bool):
            return bool(value)
        self.reject(path, f"expected true or false, found {errors.quoted(value)}")
        return False

    def resource(
        self, tree: Mapping[str, object], path: str, keys: Mapping[str, str]
    ) -> resources.Resource | None:
        """Return the resource; if it is invalid, record why and return None.

        `keys` maps muster's keys to the peer's where they differ, also for nested keys.
        """
        problems: list[validation.Problem] = []
        resource: resources.Resource | None = validation.read(resources.Resource, tree, problems)
        for problem in problems:
            ours = max((key for key in keys if _is_below(problem.path, key)), key=len, default="")
            theirs = f"{keys.get(ours, path)}.{problem.path.removeprefix(ours).lstrip('.')}"
            self.reject(theirs.rstrip("."), problem.text)
        return resource

    def imported(self, resources: Sequence[resources.Resource]) -> ImportedConfiguration:
        """Return the configuration. Raises ImportRejected if there is any problem."""
        if self.problems:
            meant = [line for line in self.differences if _MEANT in line]
            raise ImportRejected([*self.problems, *meant])
        try:
            rules = settings.Document(api_version=settings.API_VERSION, resources=tuple(resources))
        except validation.Refused as error:
            line = [problem.removeprefix("resources: ") for problem in error.problems]
            raise ImportRejected(line) from None
        return self.result(rules)

    def result(self, rules: settings.Document) -> ImportedConfiguration:
        """Return the configuration with its differences and losses."""
        return ImportedConfiguration(
            rules=rules, differences=tuple(self.differences), losses=tuple(self.losses)
        )


def _printable(line: str) -> str:
    """Return a line with line feeds and other control characters escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
    )


def _is_below(path: str, key: str) -> bool:
    return path == key or path.startswith((f"{key}.", f"{key}["))


def below(ours: dict[str, object], key: str) -> dict[str, object]:
    """Return a section of muster's tree; add it if it is missing."""
    inner = ours.setdefault(key, {})
    assert isinstance(inner, dict), f"{key} is a section"
    return inner


def put(ours: dict[str, object], path: str, value: object) -> None:
    """Set a value in muster's tree by its path."""
    *above, last = path.split(".")
    for key in above:
        ours = below(ours, key)
    ours[last] = value


class ManifestContent(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in manifests or Helm values: files, and values of `--device` or `--domain`.

    `arguments` and `environment` are those of all containers, in the order of the manifests;
    `elsewhere` are the variables whose values are not in the manifests (`valueFrom`, `envFrom`).
    `default` names the file for nodes whose labels select none, if there are several files.
    """

    files: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    domain: str | None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()
    default: str = ""
    differences: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()


def find_in_manifests(documents: Sequence[object]) -> ManifestContent | None:
    """Return the content of the manifests, or None if these documents are not manifests."""
    manifests = [*_manifests(documents)]
    if not manifests:
        return None
    arguments = [text for manifest in manifests for text in _arguments(manifest)]
    domains = [*flag_values(arguments, "--domain")]
    environment = tuple(pair for manifest in manifests for pair in _variables(manifest))
    return ManifestContent(
        files=tuple(file for manifest in manifests for file in _files(manifest)),
        devices=tuple(flag_values(arguments, "--device")),
        domain=domains[-1] if domains else None,
        arguments=tuple(arguments),
        environment=environment,
        elsewhere=tuple(name for manifest in manifests for name in _elsewhere(manifest)),
        default=next((value for name, value in environment if name == _DEFAULT), ""),
    )


def cluster_policy(documents: Sequence[object]) -> Mapping[object, object] | None:
    """Return the `spec` of the GPU operator's ClusterPolicy in manifests; None if there is none."""
    for manifest in _manifests(documents):
        spec = manifest.get("spec")
        if manifest.get("kind") == "ClusterPolicy" and isinstance(spec, Mapping):
            return spec
    return None


def _manifests(documents: Sequence[object]) -> Iterator[Mapping[object, object]]:
    for content in documents[:_ITEMS_MAX]:
        if not isinstance(content, Mapping) or not isinstance(content.get("kind"), str):
            continue
        if content.get("kind") == "List":
            items = content.get("items")
            yield from _manifests(items if isinstance(items, list) else [])
        elif "apiVersion" in content:
            yield content


def _files(manifest: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    data = manifest.get("data")
    if manifest.get("kind") == "ConfigMap" and isinstance(data, Mapping):
        for name, text in data.items():
            if isinstance(name, str) and isinstance(text, str):
                yield name, text


def _arguments(manifest: Mapping[object, object]) -> Iterator[str]:
    """Yield the command and the arguments of every container."""
    for container in _containers(manifest):
        for key in ("command", "args"):
            values = container.get(key)
            for text in values if isinstance(values, list) else []:
                yield text if isinstance(text, str) else ""


def _variables(manifest: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    """Yield the variables that have values in the manifest, for every container."""
    for container in _containers(manifest):
        yield from variables(container)


def variables(container: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    """Yield the variables in `env` that have values."""
    for variable in _environment(container):
        name, value = variable.get("name"), variable.get("value")
        if isinstance(name, str) and isinstance(value, str) and value:
            yield name, value


def _elsewhere(manifest: Mapping[object, object]) -> Iterator[str]:
    """Yield the variables whose values are not in the manifest, and ENV_FROM for each `envFrom`."""
    for container in _containers(manifest):
        for variable in _environment(container):
            if variable.get("valueFrom"):
                yield str(variable.get("name"))
        if container.get("envFrom"):
            yield ENV_FROM


def _environment(container: Mapping[object, object]) -> Iterator[Mapping[object, object]]:
    variables = container.get("env")
    for variable in variables if isinstance(variables, list) else []:
        if isinstance(variable, Mapping):
            yield variable


def _containers(manifest: Mapping[object, object]) -> Iterator[Mapping[object, object]]:
    """Yield every container of a pod or pod template."""
    spec = manifest.get("spec")
    template = spec.get("template") if isinstance(spec, Mapping) else None
    inner = template.get("spec") if isinstance(template, Mapping) else None
    for pod in (spec, inner):
        containers = pod.get("containers") if isinstance(pod, Mapping) else None
        for container in containers if isinstance(containers, list) else []:
            if isinstance(container, Mapping):
                yield container


def flag_values(arguments: Sequence[str], flag: str, *, is_switch: bool = False) -> Iterator[str]:
    """Yield a flag's values: `--flag=value`, `--flag value`, or true for a switch alone."""
    for at, text in enumerate(arguments):
        if text.startswith(f"{flag}="):
            yield text.removeprefix(f"{flag}=")
        elif text == flag and is_switch:
            yield "true"
        elif text == flag and at + 1 < len(arguments):
            yield arguments[at + 1]
