"""Pure: what a kubelet reads from a Pod, and what it writes about it."""

import enum
from collections.abc import Iterable, Mapping

import msgspec

from muster.local.kubelet import device_manager, rules

_LOCAL_SEPARATOR = "/"

Json = dict[str, object]


class Role(enum.StrEnum):
    """What happens to a container's devices after their allocation."""

    INIT = "init"  # ends, and leaves its devices to the next
    SIDECAR = "sidecar"  # a restartable init container, keeps them
    APP = "app"


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """A container and the extended resources it is limited to."""

    name: str
    limits: dict[str, int]
    role: Role = Role.APP
    image: str = ""


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as far as device allocation goes; init containers first."""

    uid: str
    namespace: str
    name: str
    containers: tuple[Container, ...]
    phase: str = "Pending"
    is_deleting: bool = False

    @property
    def has_ended(self) -> bool:
        """Return whether its devices are free."""
        return self.phase in {"Succeeded", "Failed"}


class _Resources(msgspec.Struct):
    limits: dict[str, str | int] = {}


class _Container(msgspec.Struct, rename="camel"):
    name: str
    image: str = ""
    restart_policy: str = ""
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _Spec(msgspec.Struct, rename="camel"):
    containers: list[_Container] = []
    init_containers: list[_Container] = []


class _Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str
    namespace: str = "default"
    deletion_timestamp: str = ""


class _Status(msgspec.Struct):
    phase: str = "Pending"


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


def read_pod(raw: object) -> Pod:
    """Read a Pod object. Raises msgspec.ValidationError."""
    parsed = msgspec.convert(raw, _Pod)
    return Pod(
        uid=parsed.metadata.uid,
        namespace=parsed.metadata.namespace,
        name=parsed.metadata.name,
        containers=(
            *(_container(c, Role.INIT) for c in parsed.spec.init_containers),
            *(_container(c, Role.APP) for c in parsed.spec.containers),
        ),
        phase=parsed.status.phase,
        is_deleting=bool(parsed.metadata.deletion_timestamp),
    )


def local_pod(namespace: str, name: str, limits: Mapping[str, int]) -> Pod:
    """Return a pod of one container that is in no API; its uid has its name, for a restart."""
    return Pod(
        uid=f"{namespace}{_LOCAL_SEPARATOR}{name}",
        namespace=namespace,
        name=name,
        containers=(Container(name="main", limits=dict(limits)),),
        phase="Running",
    )


def is_local(uid: str) -> bool:
    """Return whether the pod is of `local_pod`; the API's uids have no slash."""
    return _LOCAL_SEPARATOR in uid


def restored_pods(grants: Iterable[device_manager.Grant]) -> dict[str, Pod]:
    """Return the pods of grants from a checkpoint; the API has the rest later."""
    containers: dict[str, dict[str, Container]] = {}
    for grant in grants:
        container = Container(name=grant.container, limits={})
        containers.setdefault(grant.pod, {})[grant.container] = container
    pods: dict[str, Pod] = {}
    for uid, by_name in containers.items():
        namespace, _, name = uid.rpartition(_LOCAL_SEPARATOR)
        pods[uid] = Pod(
            uid=uid,
            namespace=namespace,
            name=name,
            containers=tuple(by_name.values()),
            phase="Running",
        )
    return pods


def pod_running(admitted: Pod, now: str) -> Json:
    """Return the status of a pod whose containers all run."""
    apps = [c for c in admitted.containers if c.role is Role.APP]
    inits = [c for c in admitted.containers if c.role is not Role.APP]
    return {
        "status": {
            "phase": "Running",
            "startTime": now,
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": now}
                for kind in ("Initialized", "Ready", "ContainersReady", "PodScheduled")
            ],
            "containerStatuses": [_running(container, now) for container in apps],
            "initContainerStatuses": [_running(container, now) for container in inits],
        }
    }


def pod_failed(reason: str) -> Json:
    """Return the status of a pod whose allocation failed.

    Source: pkg/kubelet/kubelet.go, rejectPod.
    """
    return {
        "status": {
            "phase": "Failed",
            "reason": "UnexpectedAdmissionError",
            "message": f"Pod was rejected: {rules.admission_error(reason)}",
        }
    }


def admission_event(refused: Pod, reason: str, *, node: str, now: str, suffix: str) -> Json:
    """Return the Event that `kubectl describe pod` shows for `pod_failed`."""
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{refused.name}.{suffix}", "namespace": refused.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": refused.namespace,
            "name": refused.name,
            "uid": refused.uid,
        },
        "type": "Warning",
        "reason": "UnexpectedAdmissionError",
        "message": rules.admission_error(reason),
        "source": {"component": "kubelet", "host": node},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _container(raw: _Container, role: Role) -> Container:
    limits = {
        name: rules.count(str(value))
        for name, value in raw.resources.limits.items()
        if rules.is_extended_resource(name)
    }
    is_sidecar = role is Role.INIT and raw.restart_policy == "Always"
    return Container(
        name=raw.name,
        limits=limits,
        role=Role.SIDECAR if is_sidecar else role,
        image=raw.image,
    )


def _running(container: Container, now: str) -> Json:
    is_done = container.role is Role.INIT
    ran = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}
    return {
        "name": container.name,
        "image": container.image,
        "imageID": container.image,
        "ready": True,
        "started": not is_done,
        "restartCount": 0,
        "state": {"terminated": ran} if is_done else {"running": {"startedAt": now}},
    }
