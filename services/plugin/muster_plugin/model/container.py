"""Pure: What one container is given with its devices, or why it is given nothing."""

import msgspec

from muster_plugin.discovery import resource_plan


class Refusal(Exception):
    """A request for what we do not have or may not give; the text ends up in the pod's event."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one container is given; `cdi_devices` name what a CDI spec says in its place."""

    devices: tuple[resource_plan.DeviceSpec, ...] = ()
    mounts: tuple[resource_plan.Mount, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: dict[str, str] = msgspec.field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
