"""Adapter: reads device configuration files, muster's or another plugin's.

A file may also be Kubernetes manifests or Helm values that contain the configuration. Unusable
content raises settings.BadSettings with every problem, and no other exception.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from muster.service import logs, settings
from muster_plugin.config import settings as config_settings
from muster_plugin.config.importers import (
    base,
    helm_values,
    nvidia,
    nvidia_nodes,
    smarter_and_generic,
)

_LOGGED_MAX: Final = 1000
_FILE: Final = "plugin.yaml"
"""The key of the plugin's configuration in muster's own manifests."""
_KEYS: Final = {
    config_settings.Format.GENERIC: {"devices", "device"},
    config_settings.Format.NVIDIA: {"version", "flags", "sharing"},
}
"""Top-level keys by plugin: a file of that plugin has at least one of its keys."""


def read(
    text: bytes,
    *,
    source: str,
    written_for: config_settings.Format,
    domain: str | None = None,
    default: str = "",
) -> config_settings.Settings:
    """Return the settings of muster's or another plugin's file. Raises settings.BadSettings."""
    if written_for is not config_settings.Format.MUSTER:
        imported = import_peer(
            text, source=source, peer=written_for, domain=domain, default=default
        )
        tree = msgspec.to_builtins(imported.rules)
        return settings.validate(config_settings.Settings, tree, source=source)
    document = settings.only(
        settings.parse(text, source=source), config_settings.Settings, source=source, file=_FILE
    )
    try:
        return settings.validate(config_settings.Settings, document or {}, source=source)
    except settings.BadSettings as error:
        raise settings.BadSettings([*error.problems, *_hints(document, source)]) from None


def import_peer(
    text: bytes,
    *,
    source: str,
    peer: config_settings.Format,
    domain: str | None = None,
    default: str = "",
    environment: Mapping[str, str] | None = None,
) -> base.ImportedConfiguration:
    """Return another plugin's configuration, converted to muster's. Raises settings.BadSettings.

    `domain` replaces the domain in generic-device-plugin's file or flags. If NVIDIA's plugin has
    several configurations, `default` names the one for nodes whose labels select none. If this
    process replaces NVIDIA's plugin, `environment` contains the variables of this process.
    """
    variables: nvidia.Variables = ()
    if environment is not None and peer is config_settings.Format.NVIDIA:
        variables, refused = nvidia.of_process(environment)
        if refused:
            raise settings.BadSettings(refused)
    try:
        if peer is config_settings.Format.NVIDIA:
            imported = _nvidia(text, source, default, variables)
        else:
            imported = _imported(text, source=source, peer=peer, domain=domain)
    except base.ImportRejected as error:
        raise settings.BadSettings([f"{source}: {problem}" for problem in error.problems]) from None
    return imported


def log(imported: base.ImportedConfiguration, source: str) -> None:
    """Log each difference and each loss once, however often the file is read."""
    for difference in imported.differences:
        _log_difference(source, difference)
    for loss in imported.losses:
        _log_loss(source, loss)


@functools.lru_cache(_LOGGED_MAX)
def _log_difference(source: str, difference: str) -> None:
    logs.logger().info("import_difference", file=source, difference=difference)


@functools.lru_cache(_LOGGED_MAX)
def _log_loss(source: str, loss: str) -> None:
    logs.logger().warning("import_loss", file=source, loss=loss)


def _imported(
    text: bytes, *, source: str, peer: config_settings.Format, domain: str | None
) -> base.ImportedConfiguration:
    documents = settings.parse(text, source=source)
    manifest = base.find_in_manifests(documents)
    if manifest is None:
        return _converted(_only(documents, source), peer, domain)
    if manifest.devices and peer is config_settings.Format.GENERIC:
        flags = [
            _only(settings.parse(text.encode(), source=f"{source}: --device"), source)
            for text in manifest.devices
        ]
        return smarter_and_generic.read_generic_flags(flags, domain=domain or manifest.domain)
    return _converted(_only_document(manifest, peer, source), peer, domain)


def _nvidia(
    text: bytes, source: str, default: str, variables: nvidia.Variables
) -> base.ImportedConfiguration:
    """Import NVIDIA's file, manifests or Helm values; `variables` override variables in them."""
    peer = config_settings.Format.NVIDIA
    documents = settings.parse(text, source=source)
    content = _nvidia_content(documents)
    files = _files(content, peer, source) if content else []
    if default and len(files) <= 1:
        raise settings.BadSettings([f"--default: {source} has only one configuration"])
    if content is None:
        return nvidia.read(_only(documents, source), (), variables)
    environment = (*variables, *content.environment)
    inputs = content.arguments, environment, content.elsewhere
    if len(files) > 1:
        imported = nvidia_nodes.read(files, default or content.default, *inputs)
    elif nvidia.has_settings(*inputs) and not files:
        imported = nvidia.read(None, *inputs)
    elif content.losses and not files:
        imported = nvidia.read({}, *inputs)
    else:
        imported = nvidia.read(_only_document(content, peer, source), *inputs)
    return base.ImportedConfiguration(
        rules=imported.rules,
        differences=(*content.differences, *imported.differences),
        losses=(*content.losses, *imported.losses),
    )


def _nvidia_content(documents: Sequence[Any]) -> base.ManifestContent | None:
    """Return the content of manifests or Helm values; None for other documents."""
    content = base.find_in_manifests(documents)
    if content is None:
        return helm_values.of_nvidia(documents[0]) if len(documents) == 1 else None
    policy = base.cluster_policy(documents)
    if policy is None:
        return content
    operator = helm_values.of_operator(policy)
    losses = [loss for loss in operator.losses if not (content.files and "ConfigMap" in loss)]
    return base.ManifestContent(
        files=(*content.files, *operator.files),
        devices=(),
        domain=None,
        arguments=content.arguments,
        environment=(*content.environment, *operator.environment),
        elsewhere=content.elsewhere,
        default=content.default or operator.default,
        differences=operator.differences,
        losses=tuple(losses),
    )


def _hints(document: Any, source: str) -> Iterator[str]:
    """Yield hints about which other plugin the configuration seems to be written for."""
    for form in config_settings.Format:
        if form is not config_settings.Format.MUSTER and _looks_like(document, form):
            yield f"{source}: this looks like {form}'s configuration; try --format {form}"


def _converted(
    document: Any, peer: config_settings.Format, domain: str | None
) -> base.ImportedConfiguration:
    if peer is config_settings.Format.SMARTER:
        return smarter_and_generic.read_smarter(helm_values.smarter_list(document))
    return smarter_and_generic.read_generic(document, domain=domain)


def _only_document(
    manifest: base.ManifestContent, written_for: config_settings.Format, source: str
) -> Any:
    """Return the only configuration in the manifests. Raises BadSettings for none or several."""
    documents = _files(manifest, written_for, source)
    if not documents:
        problem = f"these manifests contain no configuration for {written_for}"
        raise settings.BadSettings([f"{source}: {problem}"])
    if len(documents) > 1:
        files = ", ".join(name for name, _ in documents)
        raise settings.BadSettings([f"{source}: several configurations: {files}; give one file"])
    return documents[0][1]


def _files(
    manifest: base.ManifestContent, written_for: config_settings.Format, source: str
) -> list[tuple[str, Any]]:
    """Return the configurations in the manifests, each with its file's name."""
    matching: list[tuple[str, Any]] = []
    for name, text in manifest.files:
        documents = settings.parse(text.encode(), source=f"{source}: {name}")
        matching.extend(
            (name, document) for document in documents if _looks_like(document, written_for)
        )
    return matching


def _looks_like(document: Any, peer: config_settings.Format) -> bool:
    if peer is config_settings.Format.SMARTER:
        return isinstance(document, list)
    return isinstance(document, dict) and not _KEYS[peer].isdisjoint(document)


def _only(documents: Sequence[Any], source: str) -> Any:
    if len(documents) > 1:
        raise settings.BadSettings([f"{source}: {len(documents)} YAML documents, expected one"])
    return documents[0] if documents else None
