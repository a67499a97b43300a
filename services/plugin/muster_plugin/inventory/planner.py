"""Pure: plans what to advertise, from the current rules and the newest scans of nodes and GPUs."""

from collections.abc import Collection
from typing import NamedTuple

from muster import vocabulary
from muster_plugin.config import document
from muster_plugin.config import resources as config_resources
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import container_spec, replicas
from muster_plugin.model import gpu


class Planned(NamedTuple):
    """What every resource consists of, and the current rules."""

    plan: resource_plan.Plan
    configured: tuple[config_resources.Resource, ...]


class Planner:
    """Combines the last plan of device nodes (`devices`) with the newest look at the GPUs."""

    def __init__(self, here: document.NodeConfiguration) -> None:
        self.devices = resource_plan.Plan()
        self.gpu_look: gpu.Scan | None = None
        self._here = here
        self._gpu_rules: dict[str, config_resources.Resource] = {}

    def configure(self, here: document.NodeConfiguration) -> None:
        """Plan by other rules from now on."""
        self._gpu_rules.clear()
        self._here = here

    @property
    def resources(self) -> tuple[config_resources.Resource, ...]:
        """The rules for device nodes."""
        return self._here.resources

    @property
    def terms(self) -> container_spec.AllocationContext | None:
        """The rules and capabilities for allocating GPUs; None without GPUs or before a look."""
        if self.gpu_look is None or self._here.gpus is None:
            return None
        return container_spec.AllocationContext(rules=self._here.gpus, scan=self.gpu_look)

    @property
    def gpus(self) -> vocabulary.GpuNode | None:
        """The GPUs for a snapshot; None likewise."""
        if self.gpu_look is None or self._here.gpus is None:
            return None
        return replicas.node(self.gpu_look, self._here.gpus)

    def plan(self, resources_max: int, *, standing: Collection[str]) -> Planned:
        """Plan every resource; of too many, those that are advertised already go first."""
        plan, configured = self.devices, self._here.resources
        if self.gpu_look is not None and self._here.gpus is not None:
            of_gpus = replicas.plan(self.gpu_look, self._here.gpus)
            # a MIG profile that is gone keeps its rule until its devices are removed
            self._gpu_rules.update({offer.name: offer.rule for offer in of_gpus.resources})
            configured += tuple(self._gpu_rules.values())
            plan = resource_plan.merged(plan, of_gpus)
        return Planned(
            resource_plan.limited(plan, resources_max, current_names=standing), configured
        )
