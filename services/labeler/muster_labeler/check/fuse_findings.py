"""Pure: finds problems with fuse that are visible in a cluster (FUSE001 to FUSE009).

A node's kernel module, device and runtime settings are not visible from outside. They are inferred
from the failure messages of containers and the kubelet; without a message there is no finding.
"""

import enum
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from muster_labeler import model
from muster_labeler.check import findings
from muster_labeler.check.findings import ClusterView, Commands, Finding, Id, Severity

REQUIRED: Final = "required-plugins.noderesource.dev"
ALLOW: Final = "fuse.muster.dev/device-allowed"

_MESSAGES: Final = tuple(
    (id_, re.compile(pattern, re.IGNORECASE), meaning)
    for id_, pattern, meaning in (
        (Id.FUSE001, r"try .?modprobe fuse", "the fuse module is not loaded"),
        (Id.FUSE001, r"hostPath type check failed: /dev/fuse", "/dev/fuse is missing on the node"),
        (Id.FUSE001, r"/dev/fuse\W.*no such (file|device)", "/dev/fuse is missing"),
        (
            Id.FUSE002,
            r"/dev/fuse\W.*permission denied",
            "/dev/fuse cannot be opened: check its mode",
        ),
        (
            Id.FUSE006,
            r"open \W?/dev/fuse\W.*operation not permitted",
            "the container has no access to /dev/fuse: its device cgroup denies it",
        ),
        (
            Id.FUSE007,
            r"(fusermount3?|mount(\.fuse3?|ing)?).*operation not permitted",
            "the pod may not mount: check SYS_ADMIN, the user namespace, seccomp and AppArmor",
        ),
    )
)
RUNTIME: Final = re.compile(r"(containerd|cri-o)://v?([0-9]+)\.([0-9]+).*")
_NRI_SINCE: Final = {"containerd": (1, 7), "cri-o": (1, 26)}
_NRI_ON_SINCE: Final = {"containerd": (2, 0)}


class Nri(enum.Enum):
    """Whether a container runtime calls NRI plugins, according to its version."""

    ON = enum.auto()
    OFF_BY_DEFAULT = enum.auto()
    MISSING = enum.auto()


def nri_of(runtime: str) -> Nri:
    """Return whether a runtime such as `containerd://2.4.2` calls NRI plugins by default."""
    match = RUNTIME.fullmatch(runtime)
    if match is None:
        return Nri.MISSING
    version = int(match[2]), int(match[3])
    if version >= _NRI_ON_SINCE.get(match[1], (99, 0)):
        return Nri.ON
    return Nri.OFF_BY_DEFAULT if version >= _NRI_SINCE[match[1]] else Nri.MISSING


def evaluate(view: ClusterView, commands: Commands, *, only: str | None = None) -> list[Finding]:
    """Return the findings about fuse, or, with `only`, about one node."""
    nodes = {node.name: node for node in view.nodes or ()}
    pods = [pod for pod in view.pods or () if only in {None, pod.node}]
    agents = {pod.node: pod for pod in view.pods or () if pod.is_agent}
    result: list[Finding] = []
    offered = {name for node in nodes.values() for name, count in node.fuse.items() if count}
    requested = {name for pod in view.pods or () for name in pod.requests}
    for node in nodes.values():
        if only in {None, node.name}:
            agent = agents.get(node.name)
            result.extend(_at_zero(node, offered, offered | requested, agent, commands))
    annotated = [pod for pod in pods if pod.is_annotated]
    givers = {pod.node: pod for pod in view.pods or () if pod.is_nri}
    result.extend(_runtimes(annotated, nodes, commands))
    for pod in pods:
        result.extend(_errors_of(pod, commands))
    for pod in annotated:
        result.extend(_annotated(pod, givers.get(pod.node), commands, view.namespaces))
    if only is None:
        result.extend(_from_events(view.events or (), commands))
    return result


def _at_zero(
    node: model.Node,
    offered: Collection[str],
    wanted: Collection[str],
    agent: model.Pod | None,
    commands: Commands,
) -> Iterable[Finding]:
    """Report fuse resources without an allocatable device.

    After a plugin is removed, the kubelet continues to list its resource: for 5 minutes with the
    former capacity, then as 0 of 0. A plugin that has not registered since the kubelet started
    looks the same. That is a problem if pods request the resource or other nodes offer it.
    """
    if node.ready_since is None:
        return
    for resource, count in node.fuse.items():
        if count:
            continue
        capacity = node.capacity.get(resource, 0)
        evidence = (
            f"{resource}: 0 of {capacity} allocatable",
            f"plugin pod: {agent.namespace}/{agent.name}" if agent else "plugin pod: none",
        )
        is_left = agent is None or (agent.is_ready and not capacity)
        if is_left and resource not in wanted:
            yield findings.finding(
                Id.FUSE008,
                Severity.INFO,
                node.name,
                f"{resource} is left over from a plugin that is gone: no node offers it, and no "
                "pod requests it",
                evidence=evidence,
                command=_forget(node.name, resource, commands),
                docs="docs/plugin.md",
            )
            continue
        also = " (other nodes offer it)" if resource in offered else ""
        yield findings.finding(
            Id.FUSE008,
            Severity.ERROR,
            node.name,
            f"{resource}: 0 devices{also}; its plugin is gone or has not registered",
            evidence=evidence,
            command=_look(node, agent, commands),
            docs="docs/plugin.md",
        )


def _look(node: model.Node, agent: model.Pod | None, commands: Commands) -> str:
    """Return the command that shows why a resource is at 0: a log, or the node's pods."""
    if agent is None:
        return commands.pods_of(node.name)
    return commands.kubectl("logs", agent.name, "-n", agent.namespace, "--tail=50")


def _forget(node: str, resource: str, commands: Commands) -> str:
    """Return the command that removes a resource from a node, until a plugin registers it again."""
    field = resource.replace("~", "~0").replace("/", "~1")
    patch = ", ".join(
        f'{{"op": "remove", "path": "/status/{counts}/{field}"}}'
        for counts in ("capacity", "allocatable")
    )
    words = ("patch", "node", node, "--subresource=status", "--type=json", "-p", f"[{patch}]")
    return commands.kubectl(*words)


def _runtimes(
    annotated: Sequence[model.Pod], nodes: Mapping[str, model.Node], commands: Commands
) -> Iterable[Finding]:
    """Report runtimes that may ignore the annotation with which a pod requests a device."""
    for name in sorted({pod.node for pod in annotated if pod.node in nodes}):
        runtime = nodes[name].runtime
        nri = nri_of(runtime)
        if not runtime or nri is Nri.ON:
            continue
        has_it = nri is Nri.OFF_BY_DEFAULT
        yield findings.finding(
            Id.FUSE003,
            Severity.WARN if has_it else Severity.ERROR,
            name,
            "the runtime's NRI is disabled by default: check that it is enabled"
            if has_it
            else "the runtime does not support NRI: pods cannot get a device by annotation",
            evidence=(f"containerRuntimeVersion: {runtime}",),
            command=commands.kubectl("get", "node", name, "-o", "wide"),
        )


def _errors_of(pod: model.Pod, commands: Commands) -> Iterable[Finding]:
    """Report the errors that made a pod's containers fail."""
    shown: set[Id] = set()
    for text in pod.messages:
        match = next(((i, m) for i, pattern, m in _MESSAGES if pattern.search(text)), None)
        if match is None or match[0] in shown:
            continue
        shown.add(match[0])
        yield findings.finding(
            match[0],
            Severity.ERROR,
            f"{pod.namespace}/{pod.name}",
            match[1],
            evidence=(f"node {pod.node}", text[:300]),
            command=_fix_command(match[0], pod, commands),
        )


def _fix_command(id_: Id, pod: model.Pod, commands: Commands) -> str:
    host = ("debug", f"node/{pod.node}", "--profile=sysadmin", "--image=busybox", "--")
    if id_ is Id.FUSE001 and pod.node:
        return commands.kubectl(*host, "chroot", "/host", "modprobe", "fuse")
    if id_ is Id.FUSE002 and pod.node:
        return commands.kubectl(*host, "chroot", "/host", "chmod", "0666", "/dev/fuse")
    if id_ is Id.FUSE006:
        return commands.kubectl("delete", "pod", pod.name, "-n", pod.namespace)
    return commands.kubectl("get", "pod", pod.name, "-n", pod.namespace, "-o", "yaml")


def _annotated(
    pod: model.Pod,
    agent: model.Pod | None,
    commands: Commands,
    namespaces: Mapping[str, Mapping[str, str]] | None,
) -> Iterable[Finding]:
    name = f"{pod.namespace}/{pod.name}"
    if namespaces is not None and namespaces.get(pod.namespace, {}).get(ALLOW) != "true":
        yield findings.finding(
            Id.FUSE009,
            Severity.ERROR,
            name,
            f"its namespace does not allow the device: no label {ALLOW}=true",
            command=commands.kubectl("label", "namespace", pod.namespace, f"{ALLOW}=true"),
        )
    if not pod.node or pod.phase not in {"Running", "Pending"}:
        return
    if agent is None or not agent.is_ready:
        yield _no_agent(pod, agent, commands)
        if pod.phase == "Running" and any(key.startswith(REQUIRED) for key in pod.annotations):
            yield findings.finding(
                Id.FUSE005,
                Severity.WARN,
                pod.node,
                f"the runtime ignores {REQUIRED}: {name} runs without muster-fuse-nri",
                command=commands.kubectl("get", "node", pod.node, "-o", "wide"),
            )
    elif pod.started and agent.started and pod.started < agent.started:
        yield findings.finding(
            Id.FUSE006,
            Severity.WARN,
            name,
            "it started before muster-fuse-nri on its node, so it may lack /dev/fuse",
            evidence=(
                f"the pod started at {pod.started.isoformat()}",
                f"muster-fuse-nri started at {agent.started.isoformat()}",
            ),
            command=commands.kubectl("delete", "pod", pod.name, "-n", pod.namespace),
        )


def _no_agent(pod: model.Pod, agent: model.Pod | None, commands: Commands) -> Finding:
    command = commands.pods_of(pod.node)
    if agent is not None:
        command = commands.kubectl("logs", agent.name, "-n", agent.namespace, "--tail=50")
    return findings.finding(
        Id.FUSE004,
        Severity.ERROR,
        pod.node,
        f"muster-fuse-nri is not ready, and {pod.namespace}/{pod.name} needs it",
        evidence=(
            f"pod {agent.namespace}/{agent.name}" if agent else "it has no pod on this node",
        ),
        command=command,
    )


def _from_events(events: Iterable[model.KubernetesEvent], commands: Commands) -> Iterable[Finding]:
    for event in events:
        match = next(((i, m) for i, pattern, m in _MESSAGES if pattern.search(event.text)), None)
        if match is None or event.kind != "Pod":
            continue
        yield findings.finding(
            match[0],
            Severity.ERROR,
            f"{event.namespace}/{event.name}",
            match[1],
            evidence=(f"event {event.reason}", event.text[:300]),
            command=commands.kubectl("describe", "pod", event.name, "-n", event.namespace),
        )
