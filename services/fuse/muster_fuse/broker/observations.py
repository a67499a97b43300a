"""Pure: the broker's actions and observations, for reporting."""

import msgspec

from muster import vocabulary
from muster_fuse.request import caller, decision
from muster_fuse.watch import mounts


class Mounted(msgspec.Struct, frozen=True, kw_only=True):
    """A file system was mounted in a pod."""

    pod: caller.Pod
    mount: mounts.Mount


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A request was refused; at most one per second is reported for each pod and reason."""

    pod: caller.Pod
    reason: decision.Reason
    text: str


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """FUSE connections of a pod were aborted, usually because the pod had ended."""

    pod: caller.Pod
    count: int
    reason: str
    pod_has_ended: bool = True


class ConditionChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A condition of a mount began or ended."""

    pod: caller.Pod
    mount: mounts.Mount
    condition: vocabulary.FuseCondition
    holds: bool
    text: str


Observation = Mounted | Refused | Aborted | ConditionChanged
