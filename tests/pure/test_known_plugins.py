"""Pods of well-known device plugins and DRA drivers are recognised, other pods are not."""

import msgspec
import pytest

from muster.kubernetes import known_plugins, objects


def _pod(image: str, *words: str, name: str = "ctr", labels: str = "") -> objects.Pod:
    pairs = dict(label.split("=", 1) for label in labels.split())
    container = objects.Container(name=name, image=image, command=words[:1], args=words[1:])
    return objects.Pod(
        metadata=objects.Metadata(name="pod", labels=pairs),
        spec=objects.PodSpec(containers=(container,)),
    )


def _name(pod: objects.Pod) -> str | None:
    plugin = known_plugins.plugin_of(pod)
    return plugin.name if plugin else None


@pytest.mark.parametrize(
    ("image", "serves", "name"),
    [
        ("nvcr.io/nvidia/k8s-device-plugin:v0.17.1", "nvidia.com/gpu", "NVIDIA k8s-device-plugin"),
        (
            "corp:5000/mirror/nvidia/k8s-device-plugin@sha256:ab",
            "nvidia.com/mig-1g.5gb",
            "NVIDIA k8s-device-plugin",
        ),
        (
            "gcr.io/gke-release/nvidia-gpu-device-plugin@sha256:d6",
            "nvidia.com/gpu",
            "GKE nvidia-gpu-device-plugin",
        ),
        ("rocm/k8s-device-plugin", "amd.com/gpu", "AMD GPU device plugin"),
        ("intel/intel-gpu-plugin:devel", "gpu.intel.com/i915", "Intel gpu device plugin"),
        ("intel/intel-qat-plugin", "qat.intel.com/generic", "Intel qat device plugin"),
        (
            "ghcr.io/k8snetworkplumbingwg/sriov-network-device-plugin:latest-amd64",
            "intel.com/sriov_netdevice",
            "SR-IOV network device plugin",
        ),
        (
            "ghcr.io/mellanox/k8s-rdma-shared-dev-plugin",
            "rdma/hca",
            "RDMA shared device plugin",
        ),
        ("squat/generic-device-plugin", "squat.ai/serial", "generic-device-plugin"),
        ("ghcr.io/project-akri/akri/agent-full:v0.12", "akri.sh/usb-1", "Akri agent"),
        ("soolaugust/fuse-device-plugin:v1.0", "github.com/fuse", "fuse-device-plugin"),
        (
            "registry.k8s.io/dra-driver-nvidia/dra-driver-nvidia-gpu:v25",
            "gpu.nvidia.com",
            "NVIDIA DRA driver",
        ),
        (
            "ghcr.io/intel/intel-gpu-resource-driver:latest",
            "gpu.intel.com",
            "Intel gpu resource driver",
        ),
        (
            "registry.k8s.io/dra-example-driver/dra-example-driver:v0.2",
            "gpu.example.com",
            "dra-example-driver",
        ),
    ],
)
def test_a_plugin_is_recognised_by_its_image(image: str, serves: str, name: str) -> None:
    plugin = known_plugins.plugin_of(_pod(image))
    assert plugin is not None
    assert (plugin.name, plugin.serves(serves), plugin.serves("cpu")) == (name, True, False)


def test_a_plugin_is_recognised_by_a_label_if_its_image_was_renamed() -> None:
    pod = _pod("corp/gpu:1", labels="app=nvidia-device-plugin-daemonset")
    assert _name(pod) == "NVIDIA k8s-device-plugin"


@pytest.mark.parametrize(
    "pod",
    [
        _pod("nvcr.io/nvidia/k8s-device-plugin:v0.17", name="gpu-feature-discovery"),
        _pod("nvcr.io/nvidia/k8s-device-plugin:v0.17", "mps-control-daemon"),
        _pod(
            "nvcr.io/nvidia/k8s-device-plugin:v0.17",
            "config-manager",
            labels="app.kubernetes.io/name=nvidia-device-plugin",
        ),
        _pod("rocm/k8s-device-plugin:labeller-latest"),
        _pod("nvidia/k8s-dra-driver-gpu:v25", "compute-domain-controller", "-v", "4"),
        _pod("nginx"),
        _pod("", labels="app=web"),
        objects.Pod(),
    ],
)
def test_other_programs_are_not_taken_for_a_plugin(pod: objects.Pod) -> None:
    assert _name(pod) is None


@pytest.mark.parametrize("words", [("run", "--domain", "acme.io"), ("run", "--domain=acme.io")])
def test_a_plugin_serves_the_domain_that_its_arguments_name(words: tuple[str, ...]) -> None:
    plugin = known_plugins.plugin_of(_pod("squat/generic-device-plugin", *words))
    assert plugin is not None
    assert plugin.resources == ("acme.io/*",)


def test_an_entry_of_the_configuration_comes_first() -> None:
    entry = msgspec.convert(
        {"name": "ours", "images": ["acme/gpu"], "resources": ["acme.io/*"]},
        known_plugins.KnownPlugin,
    )
    assert known_plugins.plugin_of(_pod("reg/acme/gpu:2"), more=[entry]) == entry


def test_every_entry_names_its_source_and_what_it_serves() -> None:
    entries = known_plugins.KNOWN_PLUGINS
    incomplete = [
        entry.name
        for entry in entries
        if not (entry.source and (entry.images or entry.labels))
        or not (entry.resources or entry.drivers)
    ]
    assert incomplete == []
    assert len({entry.name for entry in entries}) == len(entries)
