"""The cases of NVIDIA's own tests of GPU feature discovery, and our own cases.

Origin: NVIDIA/k8s-device-plugin internal/lm/{resource,mig-strategy,nvml}_test.go and
tests/expected-output*.txt, at 1b826ac; `TestGetProductName` came after it. Cases of MPS are left
out: muster does not share by MPS.
"""

import random
import re
import string
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from muster import vocabulary
from muster_labeler.naming import allowed_labels, feature_discovery, node_labels, sources

NODE = {"gpu.machine", "gpu.mode", "mig.capable", "mps.capable", "vgpu.present"}
"""Labels that NVIDIA's tests of GPUs and MIG devices leave to other tests."""


def labels_of(node: vocabulary.GpuNode) -> dict[str, str]:
    return {
        key.removeprefix("nvidia.com/"): value
        for key, value in feature_discovery.labels(node).items()
    }


def told_of_gpus(node: vocabulary.GpuNode) -> dict[str, str]:
    return {key: value for key, value in labels_of(node).items() if key not in NODE}


def gpu(uuid: str = "0", product: str = "MOCKMODEL", compute: str | None = "8.0") -> vocabulary.Gpu:
    return vocabulary.Gpu(
        uuid=f"GPU-{uuid}", product=product, memory_mib=300, compute_capability=compute
    )


def mig_gpu(
    *devices: vocabulary.MigDevice, uuid: str = "1", product: str = "MOCKMODEL"
) -> vocabulary.Gpu:
    return replace(gpu(uuid, product, compute=None), mig_enabled=True, mig=devices)


def mig(gi: int, ci: int, memory_mib: int, uuid: str = "0") -> vocabulary.MigDevice:
    """Return what `NewMigDevice` returns in NVIDIA's tests: a MIG device without engines."""
    return vocabulary.MigDevice(
        uuid=f"MIG-{uuid}",
        profile=f"{gi}g.{memory_mib}gb",
        gi=0,
        ci=0,
        memory_mib=memory_mib,
        multiprocessors=0,
        gi_slices=gi,
        ci_slices=ci,
        copy_engines=0,
        decoders=0,
        encoders=0,
        jpeg_engines=0,
        ofa_engines=0,
    )


ENGINES = replace(
    mig(1, 2, 100),
    multiprocessors=12,
    copy_engines=13,
    decoders=14,
    encoders=15,
    jpeg_engines=16,
    ofa_engines=17,
)


def shared(
    name: str = "nvidia.com/gpu", *, replicas: int = 2, rename: str = "", profile: str = ""
) -> vocabulary.GpuResource:
    return vocabulary.GpuResource(name=rename or name, was=name, replicas=replicas, profile=profile)


AMPERE = {"gpu.compute.major": "8", "gpu.compute.minor": "0", "gpu.family": "ampere"}
SINGLE = {"mig.strategy": "single"}
MIXED = {"mig.strategy": "mixed"}


def of_gpu(
    product: str = "MOCKMODEL", *, count: int = 1, replicas: int = 1, memory: int | None = 300
) -> dict[str, str]:
    return {
        "gpu.product": product,
        "gpu.count": str(count),
        "gpu.replicas": str(replicas),
        "gpu.sharing-strategy": "time-slicing" if replicas > 1 else "none",
    } | ({"gpu.memory": str(memory)} if memory is not None else {})


def of_mig(
    product: str,
    *,
    key: str = "gpu",
    count: int = 1,
    replicas: int = 1,
    memory: int = 300,
    gi: int = 1,
    ci: int = 2,
) -> dict[str, str]:
    return {
        f"{key}.product": product,
        f"{key}.count": str(count),
        f"{key}.replicas": str(replicas),
        f"{key}.sharing-strategy": "time-slicing" if replicas > 1 else "none",
        f"{key}.memory": str(memory),
        f"{key}.multiprocessors": "0",
        f"{key}.slices.gi": str(gi),
        f"{key}.slices.ci": str(ci),
        f"{key}.engines.copy": "0",
        f"{key}.engines.decoder": "0",
        f"{key}.engines.encoder": "0",
        f"{key}.engines.jpeg": "0",
        f"{key}.engines.ofa": "0",
    }


INVALID = of_gpu("MOCKMODEL-MIG-INVALID", count=0, replicas=0, memory=0) | {
    "gpu.sharing-strategy": ""
}


@pytest.mark.parametrize(
    ("gpus", "resources", "labels"),
    [
        # resource_test.go TestGPUResourceLabeler
        ((), (), {}),
        ((gpu(),), (), of_gpu() | AMPERE),
        ((gpu(),), (shared("nvidia.com/not-gpu", profile="1g.5gb"),), of_gpu() | AMPERE),
        ((gpu(),), (shared(),), of_gpu("MOCKMODEL-SHARED", replicas=2) | AMPERE),
        ((gpu(),), (shared(rename="nvidia.com/gpu.shared"),), of_gpu(replicas=2) | AMPERE),
        # mig-strategy_test.go TestMigStrategyNoneLabels
        (
            (gpu("0"), gpu("1")),
            (shared(),),
            of_gpu("MOCKMODEL-SHARED", count=2, replicas=2) | AMPERE,
        ),
        ((mig_gpu(),), (shared(),), of_gpu(replicas=0)),
        ((mig_gpu(uuid="1"), mig_gpu(uuid="2")), (shared(),), of_gpu(count=2, replicas=0)),
        (
            (mig_gpu(), gpu()),
            (shared(),),
            of_gpu("MOCKMODEL-SHARED", count=2, replicas=2) | AMPERE,
        ),
        # ours
        ((gpu(),), (shared(replicas=0),), of_gpu() | AMPERE),
        ((replace(gpu(), memory_mib=0),), (), of_gpu(memory=None) | AMPERE),
    ],
)
def test_without_a_mig_strategy_whole_gpus_are_labelled(
    gpus: tuple[vocabulary.Gpu, ...],
    resources: tuple[vocabulary.GpuResource, ...],
    labels: Mapping[str, str],
) -> None:
    assert told_of_gpus(vocabulary.GpuNode(gpus=gpus, resources=resources)) == labels


@pytest.mark.parametrize(
    ("gpus", "resources", "labels"),
    [
        # mig-strategy_test.go TestMigStrategySingleLabels
        ((), (), {}),
        ((gpu(),), (), of_gpu() | AMPERE | SINGLE),
        ((gpu("0"), gpu("1")), (), of_gpu(count=2) | AMPERE | SINGLE),
        (
            (mig_gpu(mig(1, 2, 100)),),
            (),
            of_mig("MOCKMODEL-MIG-1g.100gb", memory=100) | SINGLE,
        ),
        (
            (mig_gpu(ENGINES, uuid="1"), mig_gpu(ENGINES, uuid="2")),
            (),
            of_mig("MOCKMODEL-MIG-1g.100gb", count=2, memory=100)
            | {
                "gpu.multiprocessors": "12",
                "gpu.engines.copy": "13",
                "gpu.engines.decoder": "14",
                "gpu.engines.encoder": "15",
                "gpu.engines.jpeg": "16",
                "gpu.engines.ofa": "17",
            }
            | SINGLE,
        ),
        ((mig_gpu(),), (), INVALID | SINGLE),
        ((mig_gpu(mig(1, 2, 100), mig(3, 4, 100)),), (), INVALID | SINGLE),
        ((mig_gpu(mig(1, 2, 100)), gpu()), (), INVALID | AMPERE | SINGLE),
        (
            (mig_gpu(mig(1, 2, 100)), gpu(), mig_gpu(uuid="2")),
            (),
            INVALID | AMPERE | SINGLE,
        ),
        # resource_test.go TestMigResourceLabeler, of `nvidia.com/gpu`
        ((mig_gpu(mig(1, 2, 300)),), (), of_mig("MOCKMODEL-MIG-1g.300gb") | SINGLE),
        (
            (mig_gpu(mig(1, 2, 300)),),
            (shared(profile="1g.300gb"),),
            of_mig("MOCKMODEL-MIG-1g.300gb-SHARED", replicas=2) | SINGLE,
        ),
        (
            (mig_gpu(mig(1, 2, 300)),),
            (shared(rename="nvidia.com/gpu.shared", profile="1g.300gb"),),
            of_mig("MOCKMODEL-MIG-1g.300gb", replicas=2) | SINGLE,
        ),
        # ours: what is known about the GPU also applies to its parts
        (
            (replace(mig_gpu(mig(1, 2, 300)), compute_capability="8.0"),),
            (),
            of_mig("MOCKMODEL-MIG-1g.300gb") | AMPERE | SINGLE,
        ),
    ],
)
def test_the_strategy_single_labels_mig_devices_in_place_of_gpus(
    gpus: tuple[vocabulary.Gpu, ...],
    resources: tuple[vocabulary.GpuResource, ...],
    labels: Mapping[str, str],
) -> None:
    node = vocabulary.GpuNode(gpus=gpus, resources=resources, mig_strategy="single")
    assert told_of_gpus(node) == labels


ME = replace(mig(1, 1, 10), profile="1g.10gb+me")
MIG_1 = "mig-1g.1gb"


@pytest.mark.parametrize(
    ("gpus", "resources", "labels"),
    [
        ((gpu(),), (), of_gpu() | AMPERE),
        ((mig_gpu(),), (), of_gpu(replicas=0)),
        # resource_test.go TestMigResourceLabeler, of `nvidia.com/mig-1g.1gb`
        (
            (mig_gpu(mig(1, 2, 1)),),
            (
                shared(rename="nvidia.com/gpu.shared"),
                shared(f"nvidia.com/{MIG_1}", profile="1g.1gb"),
            ),
            of_gpu(replicas=0)
            | of_mig("MOCKMODEL-MIG-1g.1gb-SHARED", key=MIG_1, replicas=2, memory=1),
        ),
        (
            (mig_gpu(mig(1, 2, 1)),),
            (shared(f"nvidia.com/{MIG_1}", rename="nvidia.com/small", profile="1g.1gb"),),
            of_gpu(replicas=0) | of_mig("MOCKMODEL-MIG-1g.1gb", key=MIG_1, replicas=2, memory=1),
        ),
        # ours
        (
            (mig_gpu(mig(1, 1, 1, "0"), mig(1, 1, 1, "1"), mig(3, 3, 5, "2")), gpu()),
            (),
            of_gpu(count=2)
            | AMPERE
            | of_mig("MOCKMODEL-MIG-1g.1gb", key=MIG_1, count=2, memory=1, ci=1)
            | of_mig("MOCKMODEL-MIG-3g.5gb", key="mig-3g.5gb", memory=5, gi=3, ci=3),
        ),
        (
            (mig_gpu(ME),),
            (shared("nvidia.com/mig-1g.10gb.me", profile="1g.10gb+me"),),
            of_gpu(replicas=0)
            | of_mig(
                "MOCKMODEL-MIG-1g.10gb.me-SHARED",
                key="mig-1g.10gb.me",
                replicas=2,
                memory=10,
                ci=1,
            ),
        ),
        (
            (mig_gpu(replace(mig(1, 2, 1, "1"), memory_mib=2), mig(1, 2, 1, "0")),),
            (),
            of_gpu(replicas=0) | of_mig("MOCKMODEL-MIG-1g.1gb", key=MIG_1, count=2, memory=1),
        ),
        (
            (
                mig_gpu(mig(1, 2, 1), uuid="1", product="A"),
                mig_gpu(
                    replace(mig(1, 2, 1, "1"), memory_mib=2),
                    replace(mig(1, 2, 1, "2"), memory_mib=2),
                    uuid="2",
                    product="B",
                ),
            ),
            (),
            of_gpu("A", replicas=0) | of_mig("B-MIG-1g.1gb", key=MIG_1, count=3, memory=2),
        ),
        ((mig_gpu(replace(ME, profile="no/key")),), (), of_gpu(replicas=0)),
        ((mig_gpu(replace(ME, profile="1" * 43)),), (), of_gpu(replicas=0)),
    ],
)
def test_the_strategy_mixed_labels_each_profile_beside_the_gpus(
    gpus: tuple[vocabulary.Gpu, ...],
    resources: tuple[vocabulary.GpuResource, ...],
    labels: Mapping[str, str],
) -> None:
    node = vocabulary.GpuNode(gpus=gpus, resources=resources, mig_strategy="mixed")
    assert told_of_gpus(node) == {**labels, **MIXED}


@pytest.mark.parametrize(
    ("gpus", "capable"),
    [
        # nvml_test.go TestMigCapabilityLabeler
        ((), None),
        ((gpu(),), "false"),
        ((gpu("0"), gpu("1")), "false"),
        ((mig_gpu(),), "true"),
        ((gpu(), mig_gpu()), "true"),
        # ours
        ((replace(gpu(), mig_enabled=False),), "true"),
    ],
)
def test_a_node_is_mig_capable_if_one_gpu_is(
    gpus: tuple[vocabulary.Gpu, ...], capable: str | None
) -> None:
    assert labels_of(vocabulary.GpuNode(gpus=gpus)).get("mig.capable") == capable


@pytest.mark.parametrize(
    ("name", "made"),
    [
        # resource_test.go TestSanitise
        ("a space separated string", "a-space-separated-string"),
        ("some(thing)else", "somethingelse"),
        ("some ( thing )else", "some-thing-else"),
        ("NVIDIA-TITAN-X-(Pascal)", "NVIDIA-TITAN-X-Pascal"),
        (" input  with multiple   spaces   ", "input-with-multiple-spaces"),
        ("some [ / thing / ]else", "some-thing-else"),
        ("some / thing /else", "some-thing-else"),
        ("some-thing.else_new", "some-thing.else_new"),
        # ours
        ("", ""),
        ("数据中心 GPU\t1", "GPU1"),
    ],
)
def test_a_name_keeps_what_a_label_may_hold(name: str, made: str) -> None:
    assert feature_discovery.sanitised(name) == made


LONG = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"


@pytest.mark.parametrize(
    ("product", "profile", "replicas", "value"),
    [
        # resource_test.go TestGetProductName
        ("MOCKMODEL", "1g.300gb", 1, "MOCKMODEL-MIG-1g.300gb"),
        ("MOCKMODEL", "", 1, "MOCKMODEL"),
        (
            LONG,
            "1g.24gb",
            1,
            "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edi-MIG-1g.24gb",
        ),
        (
            LONG,
            "1g.24gb+me",
            1,
            "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-MIG-1g.24gb.me",
        ),
        ("A" * 51 + "." + "B" * 10, "1g.5gb", 1, "A" * 51 + "-MIG-1g.5gb"),
        ("A" * 80, "", 1, "A" * 63),
        (
            LONG,
            "1g.24gb",
            2,
            "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstat-MIG-1g.24gb-SHARED",
        ),
        # ours
        ("NVIDIA H100 80GB HBM3", "", 1, "NVIDIA-H100-80GB-HBM3"),
        ("-_.A100._-", "", 1, "A100"),
        ("(-)", "", 1, None),
        ("(-)", "1g.24gb", 2, None),
        ("MOCKMODEL", "9" * 100, 1, "M-MIG-" + "9" * 57),
    ],
)
def test_of_a_product_that_is_too_long_the_model_is_shortened(
    product: str, profile: str, replicas: int, value: str | None
) -> None:
    device = gpu(product=product)
    if profile:
        device = mig_gpu(replace(ME, profile=profile), product=product)
    resource = shared(replicas=replicas, profile=profile)
    node = vocabulary.GpuNode(gpus=(device,), resources=(resource,), mig_strategy="single")
    assert labels_of(node).get("gpu.product") == value


VERSIONS = {
    *(f"cuda.driver-version.{part}" for part in ("major", "minor", "revision", "full")),
    *(f"cuda.driver.{part}" for part in ("major", "minor", "rev")),
    *(f"cuda.runtime-version.{part}" for part in ("major", "minor", "full")),
    *(f"cuda.runtime.{part}" for part in ("major", "minor")),
}
EVERY_GPU = set(of_gpu()) | set(AMPERE)
EVERY_MIG = set(of_mig("", key="mig-1g.1gb"))


@pytest.mark.parametrize(
    ("strategy", "device", "keys"),
    [
        # tests/expected-output{,-mig-none,-mig-single,-mig-mixed}.txt and -vgpu.txt
        ("none", gpu(), EVERY_GPU),
        ("none", mig_gpu(mig(1, 1, 1)), EVERY_GPU),
        ("single", mig_gpu(mig(1, 1, 1)), {"mig.strategy", *AMPERE, *of_mig("")}),
        ("mixed", mig_gpu(mig(1, 1, 1)), {"mig.strategy", *EVERY_GPU, *EVERY_MIG}),
    ],
)
def test_every_label_that_nvidia_expects_is_there(
    strategy: str, device: vocabulary.Gpu, keys: set[str]
) -> None:
    node = vocabulary.GpuNode(
        gpus=(replace(device, compute_capability="8.0", vgpu=False),),
        mig_strategy=strategy,
        driver_version="580.95.05",
        cuda_version="13.0",
    )
    labels = feature_discovery.labels(node)
    assert labels.keys() == {f"nvidia.com/{key}" for key in {*NODE, *VERSIONS, *keys}}


def test_a_whole_node_is_labelled_with_all_that_is_known_in_the_order_of_keys() -> None:
    gpus = tuple(
        vocabulary.Gpu(
            uuid=f"GPU-{index}",
            product="NVIDIA H100 80GB HBM3",
            memory_mib=81559,
            compute_capability="9.0",
            pci_class="0x030200",
            mig_enabled=False,
            clique="1eac2b5c-4d2d-4b8e-9a8a-1b1f0d8f3a11.4",
            vgpu=False,
        )
        for index in range(8)
    )
    node = vocabulary.GpuNode(
        gpus=gpus,
        resources=(shared(replicas=1),),
        driver_version="550.54.15",
        cuda_version="12.4",
        machine=" PowerEdge XE9680\n",
    )
    assert list(feature_discovery.labels(node).items()) == [
        ("nvidia.com/cuda.driver-version.full", "550.54.15"),
        ("nvidia.com/cuda.driver-version.major", "550"),
        ("nvidia.com/cuda.driver-version.minor", "54"),
        ("nvidia.com/cuda.driver-version.revision", "15"),
        ("nvidia.com/cuda.driver.major", "550"),
        ("nvidia.com/cuda.driver.minor", "54"),
        ("nvidia.com/cuda.driver.rev", "15"),
        ("nvidia.com/cuda.runtime-version.full", "12.4"),
        ("nvidia.com/cuda.runtime-version.major", "12"),
        ("nvidia.com/cuda.runtime-version.minor", "4"),
        ("nvidia.com/cuda.runtime.major", "12"),
        ("nvidia.com/cuda.runtime.minor", "4"),
        ("nvidia.com/gpu.clique", "1eac2b5c-4d2d-4b8e-9a8a-1b1f0d8f3a11.4"),
        ("nvidia.com/gpu.compute.major", "9"),
        ("nvidia.com/gpu.compute.minor", "0"),
        ("nvidia.com/gpu.count", "8"),
        ("nvidia.com/gpu.family", "hopper"),
        ("nvidia.com/gpu.machine", "PowerEdge-XE9680"),
        ("nvidia.com/gpu.memory", "81559"),
        ("nvidia.com/gpu.mode", "compute"),
        ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"),
        ("nvidia.com/gpu.replicas", "1"),
        ("nvidia.com/gpu.sharing-strategy", "none"),
        ("nvidia.com/mig.capable", "true"),
        ("nvidia.com/mps.capable", "false"),
        ("nvidia.com/vgpu.present", "false"),
    ]


def test_what_is_unknown_is_left_out() -> None:
    bare = vocabulary.Gpu(uuid="GPU-0", product="")
    assert labels_of(vocabulary.GpuNode(gpus=(bare,))) == {
        "gpu.count": "1",
        "gpu.machine": "unknown",
        "gpu.mode": "unknown",
        "gpu.replicas": "1",
        "gpu.sharing-strategy": "none",
        "mig.capable": "false",
        "mps.capable": "false",
    }
    part = vocabulary.MigDevice(uuid="MIG-0", profile="1g.5gb", gi=1, ci=0)
    node = vocabulary.GpuNode(gpus=(mig_gpu(part),), mig_strategy="single")
    assert told_of_gpus(node) == of_gpu("MOCKMODEL-MIG-1g.5gb", memory=None) | SINGLE


def test_what_one_gpu_does_not_report_comes_from_one_of_its_model() -> None:
    lost = replace(gpu("0"), memory_mib=None, compute_capability=None)
    node = vocabulary.GpuNode(gpus=(lost, gpu("1")))
    assert told_of_gpus(node) == of_gpu(count=2) | AMPERE


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("580.95.05", ("580", "95", "05")),
        ("595.71", ("595", "71", "")),
        ("580", None),
        ("580.95.05.1", None),
        ("580.x.05", None),
        ("580.95.05 ", None),
        ("٥٨٠.95", None),
        ("", None),
        (None, None),
    ],
)
def test_a_driver_version_of_another_shape_is_left_out(
    version: str | None, parts: tuple[str, str, str] | None
) -> None:
    labelled = labels_of(vocabulary.GpuNode(gpus=(gpu(),), driver_version=version))
    labels = {key: value for key, value in labelled.items() if key.startswith("cuda.driver")}
    expected = {}
    if parts is not None:
        major, minor, revision = parts
        expected = {
            "cuda.driver-version.full": version,
            "cuda.driver-version.major": major,
            "cuda.driver-version.minor": minor,
            "cuda.driver-version.revision": revision,
            "cuda.driver.major": major,
            "cuda.driver.minor": minor,
            "cuda.driver.rev": revision,
        }
    assert labels == expected


@pytest.mark.parametrize(
    ("compute", "family"),
    [
        ("1.3", "tesla"),
        ("2.0", "fermi"),
        ("3.7", "kepler"),
        ("5.2", "maxwell"),
        ("6.1", "pascal"),
        ("7.0", "volta"),
        ("7.2", "volta"),
        ("7.5", "turing"),
        ("8.0", "ampere"),
        ("8.7", "ampere"),
        ("8.9", "ada-lovelace"),
        ("9.0", "hopper"),
        ("10.0", "blackwell"),
        ("10.3", "blackwell"),
        ("12.1", "blackwell"),
        ("13.0", "rubin"),
        ("4.0", "undefined"),
        ("11.0", "undefined"),
        ("14.0", "undefined"),
        ("0.0", None),
        ("8", None),
        (None, None),
    ],
)
def test_each_compute_capability_is_of_one_family(compute: str | None, family: str | None) -> None:
    labels = labels_of(vocabulary.GpuNode(gpus=(gpu(compute=compute),)))
    assert labels.get("gpu.family") == family
    assert ("gpu.compute.major" in labels) == (family is not None)


@pytest.mark.parametrize(
    ("classes", "mode"),
    [
        (("0x030000",), "graphics"),
        (("0x030200", "0x030200"), "compute"),
        (("0x030000", "0x030200"), "unknown"),
        (("0x030200", None), "unknown"),
        (("0x120000",), "unknown"),
    ],
)
def test_the_mode_is_that_of_all_gpus(classes: tuple[str | None, ...], mode: str) -> None:
    gpus = tuple(
        replace(gpu(str(index)), pci_class=pci_class) for index, pci_class in enumerate(classes)
    )
    assert labels_of(vocabulary.GpuNode(gpus=gpus))["gpu.mode"] == mode


@pytest.mark.parametrize(
    ("cliques", "clique"),
    [
        (("a-b.1", "a-b.1"), "a-b.1"),
        (("a-b.1", ""), "a-b.1"),
        (("a-b.1", "a-b.2"), None),
        (("", ""), None),
        (("a" * 64,), None),
        (("a b.1",), None),
    ],
)
def test_a_node_is_in_the_clique_of_all_gpus_that_are_in_one(
    cliques: tuple[str, ...], clique: str | None
) -> None:
    gpus = tuple(replace(gpu(str(index)), clique=clique_) for index, clique_ in enumerate(cliques))
    assert labels_of(vocabulary.GpuNode(gpus=gpus)).get("gpu.clique") == clique


@pytest.mark.parametrize(
    ("vgpus", "present"),
    [((True,), "true"), ((False, True), "true"), ((False,), "false"), ((None, False), None)],
)
def test_a_virtual_gpu_is_labelled_where_it_is_known(
    vgpus: tuple[bool | None, ...], present: str | None
) -> None:
    gpus = tuple(replace(gpu(str(index)), vgpu=vgpu) for index, vgpu in enumerate(vgpus))
    assert labels_of(vocabulary.GpuNode(gpus=gpus)).get("vgpu.present") == present


A, B = gpu("a", "A"), replace(gpu("b", "B", compute="9.0"), memory_mib=800)
A_MIG, B_MIG = mig_gpu(uuid="c", product="A"), mig_gpu(uuid="d", product="B")
HOPPER = {"gpu.compute.major": "9", "gpu.compute.minor": "0", "gpu.family": "hopper"}


@pytest.mark.parametrize(
    ("gpus", "labels"),
    [
        ((A, B), of_gpu("A") | AMPERE),
        ((A, B, replace(B, uuid="GPU-z")), of_gpu("B", count=2, memory=800) | HOPPER),
        ((A_MIG, replace(A_MIG, uuid="GPU-z"), B), of_gpu("B", memory=800) | HOPPER),
        ((A_MIG, B, A), of_gpu("A", count=2) | AMPERE),
        ((A_MIG, B_MIG), of_gpu("A", replicas=0)),
    ],
)
def test_of_several_models_on_a_node_one_is_named_in_whatever_order(
    gpus: tuple[vocabulary.Gpu, ...], labels: Mapping[str, str]
) -> None:
    assert told_of_gpus(vocabulary.GpuNode(gpus=gpus)) == labels
    assert told_of_gpus(vocabulary.GpuNode(gpus=gpus[::-1])) == labels


def test_where_only_some_gpus_are_shared_the_label_describes_those() -> None:
    resources = (shared(replicas=1), shared(rename="nvidia.com/gpu.shared", replicas=4))
    node = vocabulary.GpuNode(gpus=(gpu("0"), gpu("1")), resources=resources)
    assert told_of_gpus(node) == of_gpu(count=2, replicas=4) | AMPERE


TEXT = st.text(alphabet=string.printable + "é数٥", max_size=80)
COUNT = st.none() | st.integers(0, 2**53)
VERSION = st.none() | TEXT | st.from_regex(r"[0-9]{1,12}(\.[0-9]{1,12}){0,3}", fullmatch=True)
PROFILE = st.from_regex(r"[0-9]g\.[0-9]+gb(\+me)?", fullmatch=True) | TEXT.filter(bool)
MIGS = st.builds(
    vocabulary.MigDevice,
    uuid=st.uuids().map(str),
    profile=PROFILE,
    gi=st.integers(0, 9),
    ci=st.integers(0, 9),
    memory_mib=COUNT,
    ofa_engines=COUNT,
)
GPUS = st.builds(
    vocabulary.Gpu,
    uuid=st.uuids().map(str),
    product=st.sampled_from(["NVIDIA A30", "NVIDIA A100-SXM4-40GB"]) | TEXT,
    memory_mib=COUNT,
    compute_capability=VERSION,
    pci_class=st.none() | TEXT | st.just("0x030200"),
    mig_enabled=st.none() | st.booleans(),
    mig=st.lists(MIGS, max_size=4).map(tuple),
    clique=TEXT,
    vgpu=st.none() | st.booleans(),
)
RESOURCES = st.builds(
    vocabulary.GpuResource,
    name=st.just("nvidia.com/gpu"),
    was=TEXT.filter(bool),
    replicas=st.integers(0, 2**53),
    profile=st.just("") | PROFILE,
)
NODES = st.builds(
    vocabulary.GpuNode,
    gpus=st.lists(GPUS, max_size=5).map(tuple),
    resources=st.lists(RESOURCES, max_size=4).map(tuple),
    mig_strategy=st.sampled_from(["none", "single", "mixed", "odd"]),
    driver_version=VERSION,
    cuda_version=VERSION,
    machine=st.none() | TEXT,
)
# the same rules as apimachinery content.IsLabelKey and IsLabelValue
KEY = re.compile(r"nvidia\.com/([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")
VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")


def is_of_its_form(key: str, value: str) -> bool:
    """Return whether the admission policy lets the labeler write a label."""
    form = allowed_labels.FORMS.get(key)
    if form is None:
        return re.fullmatch(allowed_labels.PROFILE_LABEL, f"{key}={value}") is not None
    return re.fullmatch(form, value) is not None


def test_no_form_is_one_of_a_label_that_is_never_written() -> None:
    part = replace(
        mig(1, 1, 10), copy_engines=1, decoders=1, encoders=1, jpeg_engines=1, ofa_engines=1
    )
    written: set[str] = set()
    for strategy in ("none", "single", "mixed"):
        for device in (gpu(), mig_gpu(part)):
            node = vocabulary.GpuNode(
                gpus=(replace(device, compute_capability="8.0", vgpu=False, clique="a.1"),),
                mig_strategy=strategy,
                driver_version="580.95.05",
                cuda_version="13.0",
            )
            sets = list(node_labels.LabelSet)
            kinds = {sources.Product("NVIDIA A30", 24576): 1}
            written |= node_labels.wanted_labels(sets, "a30", kinds=kinds, gpus=node).keys()
    of_profile = {key for key in written if re.fullmatch(allowed_labels.PROFILE_KEY, key)}
    assert written - of_profile == allowed_labels.FORMS.keys()
    prefix = "nvidia.com/mig-1g.10gb."
    assert of_profile == {
        f"{prefix}{name}" for name in (*allowed_labels.MEASURES, "product", "sharing-strategy")
    }


@pytest.mark.parametrize(
    "label",
    [
        *("nvidia.com/gpu.deploy.driver=false", "nvidia.com/mig.config=all-disabled"),
        *("nvidia.com/gpu.workload.config=vm-passthrough", "nvidia.com/mig.config.state=x"),
        *("nvidia.com/gpu.present=false", "nvidia.com/mig-1g.10gb.config=x"),
        *("nvidia.com/mig-manager.count=1", "muster.dev/anything=x", "muster.dev/accelerators=x"),
        *("skypilot.co/accelerator=H100", "nvidia.com/gpu.count=many", "nvidia.com/mps.capable=x"),
        *("nvidia.com/mig-1g.10gb.count=x", "nvidia.com/mig-1g.10gb.product="),
        *("nvidia_com/gpu.count=1", "nvidia.com/gpu-count=1"),
    ],
)
def test_labels_that_others_act_on_and_other_values_have_no_form(label: str) -> None:
    key, _, value = label.partition("=")
    assert not is_of_its_form(key, value)


@settings(max_examples=50)
@given(node=NODES, seed=st.integers())
def test_every_label_is_one_that_the_api_takes_and_none_depends_on_any_order(
    node: vocabulary.GpuNode, seed: int
) -> None:
    labels = feature_discovery.labels(node)
    assert [key for key in labels if not KEY.fullmatch(key)] == []
    assert [value for value in labels.values() if not VALUE.fullmatch(value)] == []
    assert [label for label in labels.items() if not is_of_its_form(*label)] == []
    order = random.Random(seed)  # noqa: S311 -- an order, not a secret
    gpus = [replace(gpu, mig=tuple(order.sample(gpu.mig, len(gpu.mig)))) for gpu in node.gpus]
    order.shuffle(gpus)
    assert feature_discovery.labels(replace(node, gpus=tuple(gpus))) == labels
