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
    """Combines the last plan of device nodes (`devices`) with the newest scan of the GPUs."""

    def __init__(self, configuration: document.NodeConfiguration) -> None:
        self.devices = resource_plan.Plan()
        self.gpu_scan: gpu.Scan | None = None
        self._configuration = configuration
        self._gpu_rules: dict[str, config_resources.Resource] = {}

    def configure(self, configuration: document.NodeConfiguration) -> None:
        """Plan by other rules from now on."""
        self._gpu_rules.clear()
        self._configuration = configuration

    @property
    def resources(self) -> tuple[config_resources.Resource, ...]:
        """The rules for device nodes."""
        return self._configuration.resources

    @property
    def gpu_context(self) -> container_spec.AllocationContext | None:
        """The rules and capabilities for allocating GPUs; None without GPUs or before a scan."""
        if self.gpu_scan is None or self._configuration.gpus is None:
            return None
        return container_spec.AllocationContext(rules=self._configuration.gpus, scan=self.gpu_scan)

    @property
    def gpus(self) -> vocabulary.GpuNode | None:
        """The GPUs for a snapshot; None likewise."""
        if self.gpu_scan is None or self._configuration.gpus is None:
            return None
        return replicas.node(self.gpu_scan, self._configuration.gpus)

    def plan(self, resources_max: int, *, standing: Collection[str]) -> Planned:
        """Plan every resource; of too many, those that are advertised already go first."""
        plan, configured = self.devices, self._configuration.resources
        if self.gpu_scan is not None and self._configuration.gpus is not None:
            of_gpus = replicas.plan(self.gpu_scan, self._configuration.gpus)
            # a MIG profile that is gone keeps its rule until its devices are removed
            self._gpu_rules.update({offer.name: offer.rule for offer in of_gpus.resources})
            configured += tuple(self._gpu_rules.values())
            plan = resource_plan.merged(plan, of_gpus)
        return Planned(
            resource_plan.limited(plan, resources_max, current_names=standing), configured
        )
