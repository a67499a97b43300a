"""Pure: What is to be advertised, by the rules in force and the newest look at each kind."""

from collections.abc import Collection
from typing import NamedTuple

from muster import vocabulary
from muster_plugin.config import document
from muster_plugin.config import resources as config_resources
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import container_spec, replicas
from muster_plugin.model import gpu


class Planned(NamedTuple):
    """What every resource consists of, and which rules are in force."""

    plan: resource_plan.Plan
    configured: tuple[config_resources.Resource, ...]


class Planner:
    """Puts device nodes and GPUs together. `devices` are as last planned, `look` is the newest."""

    def __init__(self, here: document.NodeConfiguration) -> None:
        self.devices = resource_plan.Plan()
        self.look: gpu.Scan | None = None
        self._here = here
        self._known: dict[str, config_resources.Resource] = {}

    def follow(self, here: document.NodeConfiguration) -> None:
        """Plan by other rules from now on."""
        self._known.clear()
        self._here = here

    @property
    def resources(self) -> tuple[config_resources.Resource, ...]:
        """The rules for device nodes."""
        return self._here.resources

    @property
    def terms(self) -> container_spec.AllocationContext | None:
        """By what terms GPUs are given; None before they were looked at, or if none are meant."""
        if self.look is None or self._here.gpus is None:
            return None
        return container_spec.AllocationContext(rules=self._here.gpus, look=self.look)

    @property
    def gpus(self) -> vocabulary.GpuNode | None:
        """What a snapshot tells about the GPUs; None likewise."""
        if self.look is None or self._here.gpus is None:
            return None
        return replicas.node(self.look, self._here.gpus)

    def plan(self, resources_max: int, *, standing: Collection[str]) -> Planned:
        """Say what every resource consists of; of too many those that stand already go first."""
        plan, configured = self.devices, self._here.resources
        if self.look is not None and self._here.gpus is not None:
            of_gpus = replicas.plan(self.look, self._here.gpus)
            # a MIG profile that is gone leaves with its devices, not with the look
            self._known.update({offer.name: offer.rule for offer in of_gpus.offers})
            configured += tuple(self._known.values())
            plan = resource_plan.merged(plan, of_gpus)
        return Planned(resource_plan.limited(plan, resources_max, standing=standing), configured)
