"""Pure: finds components of muster that do not run or are not confined (RUN001 to RUN004)."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from muster.kubernetes import installation, objects
from muster_labeler.check import findings
from muster_labeler.check.findings import ClusterView, Commands, Finding, Id, Severity

_NAME: Final = "app.kubernetes.io/name"
_STARTS: Final = timedelta(seconds=30)
"""The minimum age of a pod that is reported; a younger one may still be starting."""


def evaluate(view: ClusterView, commands: Commands) -> Iterable[Finding]:
    """Yield the findings about muster's pods and its volume claims."""
    for claim in view.own_claims:
        if claim.status.phase == "Pending" and not claim.spec.storage_class_name:
            yield findings.finding(
                Id.RUN002,
                Severity.ERROR,
                f"{claim.metadata.namespace}/{claim.metadata.name}",
                "NATS has no volume: the claim names no StorageClass, and there is no default",
                command=commands.kubectl("get", "storageclass"),
                docs="docs/install.md",
            )
    for pod in view.own_pods:
        why = _problem(pod, view.now)
        if why:
            namespace, name = pod.metadata.namespace, pod.metadata.name
            yield findings.finding(
                Id.RUN001,
                Severity.ERROR,
                f"{namespace}/{name}",
                f"is not ready: {why}",
                command=commands.kubectl("-n", namespace, "describe", "pod", name),
                docs="docs/install.md",
            )
        if restarted := _restart(pod, view.now):
            namespace, name = pod.metadata.namespace, pod.metadata.name
            yield findings.finding(
                Id.RUN004,
                Severity.WARN,
                f"{namespace}/{name}",
                restarted,
                command=commands.kubectl("-n", namespace, "logs", name, "--previous"),
                docs="docs/install.md",
            )
        if _writes_below_dev(pod):
            yield findings.finding(
                Id.RUN003,
                Severity.INFO,
                f"{pod.metadata.namespace}/{pod.metadata.name}",
                "could write to file systems that the node has mounted below /dev, such as "
                "/dev/mqueue: its container runtime or kubelet lacks recursive read-only mounts",
                command=commands.kubectl(
                    *("get", "node", pod.spec.node_name if pod.spec else ""),
                    *("-o", "jsonpath={.status.runtimeHandlers}"),
                ),
                docs="docs/security.md",
            )


def _writes_below_dev(pod: objects.Pod) -> bool:
    """Return whether a running plugin has no recursively read-only mount of /dev."""
    is_plugin = (pod.metadata.labels or {}).get(_NAME) == "muster-plugin"
    mounts = [mount for status in pod.container_statuses for mount in status.volume_mounts or ()]
    is_recursive = any(
        mount.mount_path == "/dev" and mount.recursive_read_only == "Enabled" for mount in mounts
    )
    return is_plugin and pod.phase == "Running" and not is_recursive


def _problem(pod: objects.Pod, now: datetime) -> str:
    """Return why a pod is not ready; empty if ready, succeeded, ending, new, or a test pod."""
    created = pod.metadata.created_at
    is_new = created is not None and now - created < _STARTS
    ready = objects.condition(pod.conditions, "Ready")
    # a pod that has succeeded is, for example, that of the Job that makes keys
    is_done = pod.metadata.is_being_deleted or pod.phase == "Succeeded"
    is_test = (pod.metadata.labels or {}).get(_NAME) in installation.TESTS
    if is_done or is_test or is_new or (ready is not None and ready.status == "True"):
        return ""
    scheduled = objects.condition(pod.conditions, "PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return scheduled.message or scheduled.reason
    for status in pod.container_statuses:
        waiting = status.state.waiting if status.state else None
        if waiting is not None:
            return f"{waiting.reason} {waiting.message}".strip()
        ended = status.state.terminated if status.state else None
        if ended is not None:
            return f"{status.name} ended with exit code {ended.exit_code}; see its log"
        if not status.ready:
            return f"{status.name} runs but reports that it is not ready; see its log"
    return pod.phase or "unknown"


def _restart(pod: objects.Pod, now: datetime) -> str:
    """Return how a container of a ready pod failed within the last hour; empty if none did."""
    ready = objects.condition(pod.conditions, "Ready")
    if ready is None or ready.status != "True" or pod.metadata.is_being_deleted:
        return ""
    return installation.recent_failure(pod.status, now) if pod.status else ""
