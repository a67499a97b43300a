"""Pure: lists well-known device plugins and DRA drivers, and recognises their pods.

Each entry cites its source, a file of its project. If several programs share an image, as NVIDIA's
device plugin and its feature discovery do, `not_programs` lists the programs that are not the
plugin.
"""

import fnmatch
import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, Final

import msgspec

from muster.kubernetes import objects

ENTRIES_MAX: Final = 64
"""The maximum number of entries that a configuration may add."""

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_Texts = Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)]


class KnownPlugin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device plugin or DRA driver; its pods are recognised by an image or a label.

    `images` are patterns for the last parts of an image's name, without registry, tag and digest;
    `labels` are `key=value`. `resources` and `drivers` are patterns for the names that it serves.
    `domain_flag` is the argument that replaces the domain of its resources. A plugin that
    `registers_on_demand` serves a resource only while something requests it.
    """

    name: _Text
    images: _Texts = ()
    labels: _Texts = ()
    resources: _Texts = ()
    drivers: _Texts = ()
    not_programs: _Texts = ()
    domain_flag: Annotated[str, msgspec.Meta(max_length=63)] = ""
    registers_on_demand: bool = False
    source: Annotated[str, msgspec.Meta(max_length=253)] = ""

    def serves(self, resource_or_driver: str) -> bool:
        """Return whether the plugin serves this resource or is this driver."""
        patterns = (*self.resources, *self.drivers)
        return any(fnmatch.fnmatchcase(resource_or_driver, pattern) for pattern in patterns)


def plugin_of(pod: objects.Pod, more: Sequence[KnownPlugin] = ()) -> KnownPlugin | None:
    """Return the plugin that a pod runs, with its configured domain; None if it runs none.

    Entries of the configuration (`more`) take precedence.
    """
    spec = pod.spec or objects.PodSpec()
    labels = {f"{key}={value}" for key, value in pod.labels.items()}
    is_candidate = not labels.isdisjoint(_LABELS) or any(
        _is_known_image(container.image) for container in spec.containers or ()
    )
    if not (more or is_candidate):
        return None
    for plugin in (*more, *KNOWN_PLUGINS):
        has_label = not labels.isdisjoint(plugin.labels)
        for container in spec.containers or ():
            if not (has_label or _has_image(plugin, container.image)):
                continue
            if not _is_other_program(plugin, container):
                return _with_domain(plugin, container)
    return None


def _has_image(plugin: KnownPlugin, image: str) -> bool:
    """Return whether one of the plugin's patterns matches the last parts of an image's name."""
    parts = image.partition("@")[0].split("/")
    parts[-1] = parts[-1].partition(":")[0]
    return any(
        fnmatch.fnmatchcase("/".join(parts[-1 - pattern.count("/") :]), pattern)
        for pattern in plugin.images
    )


@functools.lru_cache(maxsize=1024)
def _is_known_image(image: str) -> bool:
    """Return whether an image is in the table; cached, because most pods share few images."""
    return any(_has_image(plugin, image) for plugin in KNOWN_PLUGINS)


def _is_other_program(plugin: KnownPlugin, container: objects.Container) -> bool:
    """Return whether a container runs another program of the plugin's image."""
    words = (
        container.name,
        container.image.rpartition("/")[2],
        *(container.command or ()),
        *(container.args or ()),
    )
    return any(program in word for program in plugin.not_programs for word in words)


def _with_domain(plugin: KnownPlugin, container: objects.Container) -> KnownPlugin:
    """Return the plugin; its resources get the domain that the container's arguments name."""
    domain = _argument(plugin.domain_flag, [*(container.command or ()), *(container.args or ())])
    if not domain:
        return plugin
    resources = (f"{domain}/{pattern.partition('/')[2]}" for pattern in plugin.resources)
    return msgspec.structs.replace(plugin, resources=tuple(dict.fromkeys(resources)))


def _argument(flag: str, arguments: Sequence[str]) -> str:
    """Return the value of a flag, written `--flag value` or `--flag=value`; empty if absent."""
    if not flag:
        return ""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == flag:
            return value or following
    return ""


def _intel(kinds: Iterable[str]) -> Iterable[KnownPlugin]:
    for kind in kinds:
        yield KnownPlugin(
            name=f"Intel {kind} device plugin",
            images=(f"intel-{kind}-plugin",),
            labels=(f"app=intel-{kind}-plugin",),
            resources=(f"{kind}.intel.com/*",),
            source="intel/intel-device-plugins-for-kubernetes deployments/*_plugin/base",
        )


def _intel_drivers(kinds: Iterable[str]) -> Iterable[KnownPlugin]:
    for kind in kinds:
        yield KnownPlugin(
            name=f"Intel {kind} resource driver",
            images=(f"intel-{kind}-resource-driver",),
            labels=(f"app=intel-{kind}-resource-driver-kubelet-plugin",),
            drivers=(f"{kind}.intel.com",),
            source="intel/intel-resource-drivers-for-kubernetes deployments/*/base",
        )


KNOWN_PLUGINS: Final = (
    KnownPlugin(
        name="NVIDIA k8s-device-plugin",
        images=("nvidia/k8s-device-plugin",),
        labels=(
            "name=nvidia-device-plugin-ds",
            "app=nvidia-device-plugin-daemonset",
            "app.kubernetes.io/name=nvidia-device-plugin",
        ),
        resources=("nvidia.com/*",),
        not_programs=("gpu-feature-discovery", "mps-control-daemon", "config-manager"),
        source="NVIDIA/k8s-device-plugin deployments/static/nvidia-device-plugin.yml and "
        "deployments/helm; NVIDIA/gpu-operator assets/state-device-plugin/0500_daemonset.yaml",
    ),
    KnownPlugin(
        name="NVIDIA KubeVirt GPU device plugin",
        images=("nvidia/kubevirt-gpu-device-plugin",),
        labels=("app=nvidia-sandbox-device-plugin-daemonset",),
        resources=("nvidia.com/*",),
        source="NVIDIA/gpu-operator assets/state-sandbox-device-plugin/0500_daemonset.yaml",
    ),
    KnownPlugin(
        name="GKE nvidia-gpu-device-plugin",
        images=("nvidia-gpu-device-plugin",),
        labels=("k8s-app=nvidia-gpu-device-plugin",),
        resources=("nvidia.com/*",),
        source="GoogleCloudPlatform/container-engine-accelerators "
        "cmd/nvidia_gpu/device-plugin.yaml",
    ),
    KnownPlugin(
        name="HAMi device plugin",
        images=("projecthami/hami",),
        labels=("app.kubernetes.io/component=hami-device-plugin",),
        resources=("nvidia.com/*",),
        not_programs=("vGPUmonitor", "vgpu-monitor", "scheduler", "validator"),
        source="Project-HAMi/HAMi charts/hami/templates/device-plugin/daemonsetnvidia.yaml",
    ),
    KnownPlugin(
        name="AMD GPU device plugin",
        images=("rocm/k8s-device-plugin",),
        labels=("name=amdgpu-dp-ds",),
        resources=("amd.com/*",),
        not_programs=("labeller",),
        source="ROCm/k8s-device-plugin k8s-ds-amdgpu-dp.yaml",
    ),
    *_intel(("gpu", "qat", "sgx", "fpga", "dsa", "iaa", "dlb", "npu")),
    KnownPlugin(
        name="Habana device plugin",
        images=("docker-k8s-device-plugin",),
        labels=("name=habanalabs-device-plugin-ds",),
        resources=("habana.ai/*",),
        source="HabanaAI/habanalabs-k8s-device-plugin habanalabs-device-plugin-gaudi.yaml",
    ),
    KnownPlugin(
        name="AWS Neuron device plugin",
        images=("neuron-device-plugin",),
        labels=("name=neuron-device-plugin-ds",),
        resources=("aws.amazon.com/neuron*",),
        source="aws-neuron/aws-neuron-sdk k8s-neuron-device-plugin.yml",
    ),
    KnownPlugin(
        name="AWS EFA device plugin",
        images=("aws-efa-k8s-device-plugin",),
        labels=("name=aws-efa-k8s-device-plugin",),
        resources=("vpc.amazonaws.com/efa",),
        source="aws/eks-charts stable/aws-efa-k8s-device-plugin",
    ),
    KnownPlugin(
        name="SR-IOV network device plugin",
        images=("*sriov-network-device-plugin*",),
        labels=("app=sriovdp", "app=sriov-device-plugin", "name=sriov-device-plugin"),
        resources=("intel.com/*",),
        domain_flag="--resource-prefix",
        source="k8snetworkplumbingwg/sriov-network-device-plugin "
        "deployments/sriovdp-daemonset.yaml",
    ),
    KnownPlugin(
        name="RDMA shared device plugin",
        images=("k8s-rdma-shared-dev-plugin",),
        labels=("name=rdma-shared-dp-ds",),
        resources=("rdma/*",),
        source="Mellanox/k8s-rdma-shared-dev-plugin deployment/k8s/base/daemonset.yaml",
    ),
    KnownPlugin(
        name="KubeVirt virt-handler",
        images=("virt-handler",),
        labels=("kubevirt.io=virt-handler",),
        resources=("devices.kubevirt.io/*",),
        registers_on_demand=True,
        source="kubevirt/kubevirt pkg/virt-handler/device-manager/device_controller.go",
    ),
    KnownPlugin(
        name="smarter-device-manager",
        images=("smarter-device-manager",),
        labels=("name=smarter-device-manager",),
        resources=("smarter-devices/*",),
        source="smarter-project/smarter-device-manager smarter-device-manager-ds.yaml",
    ),
    KnownPlugin(
        name="generic-device-plugin",
        images=("generic-device-plugin",),
        labels=("app.kubernetes.io/name=generic-device-plugin",),
        resources=("squat.ai/*", "devic.es/*"),
        domain_flag="--domain",
        source="squat/generic-device-plugin manifests/generic-device-plugin.yaml",
    ),
    KnownPlugin(
        name="Akri agent",
        images=("akri/agent", "akri/agent-full"),
        labels=("name=akri-agent",),
        resources=("akri.sh/*",),
        registers_on_demand=True,
        source="project-akri/akri deployment/helm/templates/agent.yaml",
    ),
    KnownPlugin(
        name="k8s-host-device-plugin",
        images=("k8s-host-device-plugin",),
        resources=("github.com/*",),
        source="everpeace/k8s-host-device-plugin README.md",
    ),
    KnownPlugin(
        name="fuse-device-plugin",
        images=("fuse-device-plugin",),
        labels=("name=fuse-device-plugin-ds",),
        resources=("github.com/fuse",),
        source="kuberenetes-learning-group/fuse-device-plugin README",
    ),
    KnownPlugin(
        name="NVIDIA DRA driver",
        images=("dra-driver-nvidia-gpu", "k8s-dra-driver-gpu", "nvidia/k8s-dra-driver"),
        drivers=("gpu.nvidia.com", "compute-domain.nvidia.com"),
        not_programs=(
            "compute-domain-controller",
            "compute-domain-daemon",
            "mps-control-daemon",
            "webhook",
        ),
        source="kubernetes-sigs/dra-driver-nvidia-gpu "
        "deployments/helm/dra-driver-nvidia-gpu/templates/kubeletplugin.yaml",
    ),
    *_intel_drivers(("gpu", "gaudi", "qat")),
    KnownPlugin(
        name="AMD GPU DRA driver",
        images=("k8s-gpu-dra-driver",),
        drivers=("gpu.amd.com",),
        not_programs=("webhook",),
        source="ROCm/k8s-gpu-dra-driver helm-charts-k8s/templates/kubeletplugin.yaml",
    ),
    KnownPlugin(
        name="dra-example-driver",
        images=("dra-example-driver",),
        drivers=("*.example.com",),
        not_programs=("webhook",),
        source="kubernetes-sigs/dra-example-driver "
        "deployments/helm/dra-example-driver/templates/kubeletplugin.yaml",
    ),
    KnownPlugin(
        name="DRANET",
        images=("dranet",),
        labels=("app=dranet", "k8s-app=dranet"),
        drivers=("dra.net",),
        source="kubernetes-sigs/dranet install.yaml",
    ),
)
"""The table, in order of precedence: the first match applies."""

_LABELS: Final = frozenset(label for plugin in KNOWN_PLUGINS for label in plugin.labels)
