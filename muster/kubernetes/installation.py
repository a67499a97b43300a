"""Pure: selects muster's pods in a cluster, and determines the credentials for its NATS."""

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from muster import wording
from muster.kubernetes import objects

PART_OF: Final = "app.kubernetes.io/part-of=muster"
HEALTH: Final = "muster-health"
NATS: Final = "muster-nats"
NOTIFIER: Final = "muster-notifier"
NATS_PORT: Final = 4222
HTTP_PORT: Final = 8080
TESTS: Final = frozenset({"muster-test", "muster-test-device"})
"""The name labels of test pods; `helm test` may leave these pods behind after a failure."""
_NAME: Final = "app.kubernetes.io/name"
_RECENT: Final = timedelta(hours=1)
_PASSWORD: Final = re.compile(r"[A-Za-z0-9_.~-]+")
_TLS: Final = "-nats-tls"
"""The end of the name of the Secret with NATS' certificate; its start is common to all objects."""
_SETTINGS: Final = "configuration"
_RECEIVERS: Final = "receivers"
"""Volumes: the settings of a part, and the Secret of the notifier's receivers."""


class Unreachable(Exception):
    """The cluster, or muster in the cluster, cannot be used; the message gives the reason."""


class Allocation(enum.Enum):
    """The state of a pod that requests a device."""

    GIVEN = enum.auto()
    WAITING = enum.auto()
    UNSCHEDULABLE = enum.auto()
    REFUSED = enum.auto()


class Role(enum.StrEnum):
    """The NATS user of a command: a reader receives events, an administrator may also write."""

    READER = "reader"
    ADMIN = "admin"


class SecretKey(objects.Object, frozen=True):
    """A key of a Secret."""

    name: str = ""
    key: str = ""


class _Source(objects.Object, frozen=True):
    secret_key_ref: SecretKey | None = None


class _Variable(objects.Object, frozen=True):
    name: str = ""
    value_from: _Source | None = None


class _Container(objects.Object, frozen=True):
    name: str = ""
    image: str = ""
    env: tuple[_Variable, ...] | None = None


class _SecretVolume(objects.Object, frozen=True):
    secret_name: str = ""


class _ConfigMapVolume(objects.Object, frozen=True):
    name: str = ""


class _Volume(objects.Object, frozen=True):
    name: str = ""
    secret: _SecretVolume | None = None
    config_map: _ConfigMapVolume | None = None


class _Spec(objects.Object, frozen=True):
    node_name: str = ""
    subdomain: str = ""
    containers: tuple[_Container, ...] | None = None
    volumes: tuple[_Volume, ...] | None = None


class _Status(objects.PodStatus, frozen=True):
    reason: str = ""
    message: str = ""


class Pod(objects.HasMetadata, frozen=True):
    """One of muster's pods."""

    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def name(self) -> str:
        """Return the pod's name."""
        return self.metadata.name

    @property
    def part(self) -> str:
        """Return the pod's part of muster, such as `muster-health`."""
        return self.labels.get(_NAME, "")

    @property
    def is_ready(self) -> bool:
        """Whether the pod accepts requests."""
        conditions = self.status.conditions or ()
        return objects.is_true(conditions, "Ready") and not self.metadata.is_being_deleted

    @property
    def containers(self) -> list[str]:
        """Return the names of its containers."""
        return [container.name for container in self.spec.containers or ()]

    @property
    def config_maps(self) -> list[str]:
        """Return the names of the mounted ConfigMaps."""
        return [each.config_map.name for each in self.spec.volumes or () if each.config_map]

    @property
    def image(self) -> str:
        """Return the image of the first container; empty if there is none."""
        return next((container.image for container in self.spec.containers or ()), "")

    @property
    def restarts(self) -> int:
        """Return how many times its containers were restarted."""
        return sum(status.restart_count for status in self.status.container_statuses or ())

    @property
    def is_over(self) -> bool:
        """Whether this pod has succeeded, as the pods of Jobs do."""
        return self.status.phase == "Succeeded"

    @property
    def is_test(self) -> bool:
        """Whether this pod belongs to `helm test`, not to a part of muster."""
        return self.part in TESTS

    @property
    def reason(self) -> str:
        """Return why the pod is not ready: a container's reason, the pod's, or the scheduler's."""
        statuses = self.status.container_statuses or ()
        states = [status.state for status in statuses if status.state and not status.ready]
        details = [detail for state in states for detail in (state.waiting, state.terminated)]
        reasons = [detail.reason for detail in details if detail and detail.reason]
        # a pod without a node has no condition Ready
        for kind in ("Ready", "PodScheduled"):
            unmet = objects.condition(self.status.conditions or (), kind)
            reasons += [unmet.message or unmet.reason] if unmet and unmet.status != "True" else []
        return next(filter(None, reasons), "") or self.status.phase or "unknown"


def recent_failure(status: objects.PodStatus, now: datetime) -> str:
    """Return a description of the pod's last container failure in the past hour; empty if none.

    A pod whose containers fail repeatedly may be ready between two failures.
    """
    failures = []
    for container in status.container_statuses or ():
        end = container.last_state.terminated if container.last_state else None
        at = objects.parse_time(end.finished_at) if end else None
        if end is not None and end.exit_code and at is not None and now - at < _RECENT:
            text = (
                f"{wording.counted(container.restart_count, 'restart')} of {container.name}, the "
                f"last at {at:%H:%M} UTC ({end.reason or 'ended'}, exit code {end.exit_code})"
            )
            failures.append((at, text))
    return max(failures)[1] if failures else ""


class Secret(objects.HasMetadata, frozen=True):
    """A Secret; its values are base64, which msgspec decodes."""

    data: dict[str, bytes] | None = None


class ConfigMap(objects.HasMetadata, frozen=True):
    """A ConfigMap."""

    data: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What a client needs to log on: a password or credentials, and an authority for TLS."""

    role: Role
    secret: SecretKey
    is_password: bool
    authority: str = ""
    """The ConfigMap with the trusted certificate; empty without TLS."""
    server: str = ""
    """The name in the server's certificate."""

    def address(self, where: str, password: str) -> str:
        """Return NATS's address at `host:port`. Raises ValueError for an unusable password."""
        if not self.is_password:
            return f"{'tls' if self.authority else 'nats'}://{where}"
        if not _PASSWORD.fullmatch(password):
            raise ValueError(
                f"Secret {self.secret.name}: {self.secret.key} is empty, or has a character that "
                "cannot be part of an address, such as a line feed"
            )
        scheme = "tls" if self.authority else "nats"
        return f"{scheme}://{self.role}:{password}@{where}"


def ready(pods: Iterable[Pod], part: str) -> list[Pod]:
    """Return the ready pods of a part, sorted by name."""
    return sorted(
        (pod for pod in pods if pod.part == part and pod.is_ready), key=lambda pod: pod.name
    )


def absent(pods: Sequence[Pod], part: str, namespace: str) -> str:
    """Return why no pod of a part is available."""
    if not pods:
        return f"no pod of muster is in the namespace {namespace}; name another with --namespace"
    there = [pod for pod in pods if pod.part == part]
    if not there:
        return f"no pod of {part} is in the namespace {namespace}"
    states = ", ".join(f"{pod.name} ({pod.status.phase or 'unknown'})" for pod in there)
    return f"no pod of {part} is ready in the namespace {namespace}: {states}"


def receivers_secret(pods: Sequence[Pod], namespace: str) -> str:
    """Return the name of the Secret of receivers that the notifier reads. Raises Unreachable."""
    volumes = _volumes(pods, NOTIFIER, namespace)
    names = {v.secret.secret_name for v in volumes if v.name == _RECEIVERS and v.secret}
    if not names:
        problem = "reads no Secret of receivers: upgrade muster"
        raise Unreachable(f"the notifier in the namespace {namespace} {problem}")
    if len(names) > 1:
        which = ", ".join(sorted(names))
        raise Unreachable(f"notifiers in the namespace {namespace} read several Secrets: {which}")
    return names.pop()


def settings_map(pods: Sequence[Pod], part: str, namespace: str) -> str:
    """Return the name of the ConfigMap with the settings of a part. Raises Unreachable."""
    for volume in _volumes(pods, part, namespace):
        if volume.name == _SETTINGS and volume.config_map:
            return volume.config_map.name
    raise Unreachable(f"{part} in the namespace {namespace} reads no settings from a ConfigMap")


def _volumes(pods: Sequence[Pod], part: str, namespace: str) -> list[_Volume]:
    there = [pod for pod in pods if pod.part == part]
    if not there:
        raise Unreachable(absent(pods, part, namespace))
    return [volume for pod in there for volume in pod.spec.volumes or ()]


def allocation(pods: Iterable[Pod]) -> tuple[Allocation, str]:
    """Return the state of these pods, and the ready pod's node or the reason why none is ready."""
    state, text = Allocation.WAITING, "there is no such pod"
    for pod in pods:
        if pod.is_ready:
            return Allocation.GIVEN, pod.spec.node_name
        if pod.status.phase == "Failed":
            # the kubelet's description of a device plugin's answer
            why = f"{pod.status.reason}: {pod.status.message}"
            state, text = Allocation.REFUSED, f"{pod.name} on {pod.spec.node_name}: {why}"
        elif state is not Allocation.REFUSED:
            state, text = Allocation.WAITING, f"{pod.name} is {pod.status.phase or 'unknown'}"
            for condition in pod.status.conditions or ():
                if condition.reason == "Unschedulable":
                    state, text = Allocation.UNSCHEDULABLE, condition.message
    return state, text


def login(nats: Pod, role: Role) -> Login:
    """Return how a role logs on, derived from the pod of a NATS server.

    In `minimal`, the server's environment refers to each role's password. `production` uses only
    credentials; the Secret of the returned name contains them, if it exists.
    """
    secrets = [volume.secret.secret_name for volume in nats.spec.volumes or () if volume.secret]
    names = [name.removesuffix(_TLS) for name in secrets if name.endswith(_TLS)]
    authority = f"{names[0]}-nats-ca" if names else ""
    for container in nats.spec.containers or ():
        for variable in container.env or ():
            source = variable.value_from and variable.value_from.secret_key_ref
            if source and variable.name == f"NATS_PASSWORD_{role.upper()}":
                return Login(
                    role=role,
                    secret=source,
                    is_password=True,
                    authority=authority,
                    server=nats.spec.subdomain,
                )
    return Login(
        role=role,
        secret=SecretKey(name=f"{names[0] if names else 'muster'}-{role}-creds", key="nats.creds"),
        is_password=False,
        authority=authority,
        server=nats.spec.subdomain,
    )
