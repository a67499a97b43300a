"""Pure: finds a plugin's configuration inside the Kubernetes manifests that deploy it.

That is a ConfigMap, or a DaemonSet whose arguments hold the configuration; their texts are then
parsed like files.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

ENV_FROM: Final = "envFrom"
"""Stands for all variables of a ConfigMap or Secret."""

_ITEMS_MAX: Final = 1_000
_NONE: Final = (None, None)


class ManifestContent(msgspec.Struct, frozen=True, kw_only=True):
    """Texts with configuration: files of ConfigMaps, and values of `--device` flags.

    `arguments` and `environment` are those of all containers, in the order of the manifests;
    `elsewhere` are the variables whose values are not in the manifests (`valueFrom`, `envFrom`).
    """

    files: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    domain: str | None
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[str, ...] = ()


def find(documents: Sequence[object]) -> ManifestContent | None:
    """Return the content of the manifests, or None if these documents are not manifests."""
    manifests = [*_manifests(documents)]
    if not manifests:
        return None
    arguments = [text for manifest in manifests for text in _arguments(manifest)]
    domains = [*_values(arguments, "--domain")]
    return ManifestContent(
        files=tuple(file for manifest in manifests for file in _files(manifest)),
        devices=tuple(_values(arguments, "--device")),
        domain=domains[-1] if domains else None,
        arguments=tuple(arguments),
        environment=tuple(pair for manifest in manifests for pair in _variables(manifest)),
        elsewhere=tuple(name for manifest in manifests for name in _elsewhere(manifest)),
    )


def _manifests(documents: Sequence[object]) -> Iterator[Mapping[object, object]]:
    for document in documents[:_ITEMS_MAX]:
        if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
            continue
        if document.get("kind") == "List":
            items = document.get("items")
            yield from _manifests(items if isinstance(items, list) else [])
        elif "apiVersion" in document:
            yield document


def _files(manifest: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    data = manifest.get("data")
    if manifest.get("kind") == "ConfigMap" and isinstance(data, Mapping):
        for name, text in data.items():
            if isinstance(name, str) and isinstance(text, str):
                yield name, text


def _arguments(manifest: Mapping[object, object]) -> Iterator[str]:
    """Yield the arguments of every container."""
    for container in _containers(manifest):
        for key in ("command", "args"):
            values = container.get(key)
            for text in values if isinstance(values, list) else []:
                yield text if isinstance(text, str) else ""


def _variables(manifest: Mapping[object, object]) -> Iterator[tuple[str, str]]:
    """Yield the variables of every container whose values are in the manifest."""
    for container in _containers(manifest):
        variables = container.get("env")
        for variable in variables if isinstance(variables, list) else []:
            name, value = (
                (variable.get("name"), variable.get("value"))
                if isinstance(variable, Mapping)
                else _NONE
            )
            if isinstance(name, str) and isinstance(value, str) and value:
                yield name, value


def _elsewhere(manifest: Mapping[object, object]) -> Iterator[str]:
    """Yield the variables whose values are elsewhere; `envFrom` only as such."""
    for container in _containers(manifest):
        variables = container.get("env")
        for variable in variables if isinstance(variables, list) else []:
            if isinstance(variable, Mapping) and variable.get("valueFrom"):
                yield str(variable.get("name"))
        if container.get("envFrom"):
            yield ENV_FROM


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


def _values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    for at, text in enumerate(arguments):
        if text.startswith(f"{flag}="):
            yield text.removeprefix(f"{flag}=")
        elif text == flag and at + 1 < len(arguments):
            yield arguments[at + 1]
