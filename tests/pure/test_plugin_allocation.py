from datetime import UTC, datetime

import pytest

from muster.pb import deviceplugin_pb2 as dp
from muster_plugin.config import gpus as config_gpus
from muster_plugin.config import resources
from muster_plugin.discovery import resource_plan
from muster_plugin.gpu import container_spec
from muster_plugin.inventory import inventory
from muster_plugin.kubelet import allocation, protobuf
from muster_plugin.model import advertised, gpu

RULE = resources.Resource(name="nvidia.com/gpu", groups=(), env="", grace_s=60.0)
CONTROL = container_spec.CONTROL_NODES


def replica(number: int, at: int) -> advertised.Unit:
    name = f"GPU-{number}"
    device = gpu.Device(part=gpu.Part(gpu=name), uuid=name, index=str(number), minor=number)
    return advertised.Unit(
        id=f"{name}::{at}", physical=name, identity={0: name}, gpu=device, numa=number
    )


def allocator(sharing: config_gpus.Gpus | None = None) -> allocation.Allocator:
    """Return an allocator of two GPUs with three replicas each."""
    offer = resource_plan.PlannedResource(
        name=RULE.name, rule=RULE, units=tuple(replica(n, at) for n in (0, 1) for at in range(3))
    )
    devices = inventory.Inventory(node="n1", plugin="p")
    at = datetime(2026, 11, 1, tzinfo=UTC)
    devices.observe(resource_plan.Plan(resources=(offer,)), (RULE,), now=0.0, at=at)
    rules = sharing or config_gpus.Gpus()
    devices.gpu_context = container_spec.AllocationContext(rules=rules)
    return allocation.Allocator(devices, RULE.name)


def test_a_container_gets_each_gpu_once_whatever_its_replicas() -> None:
    gpus = allocator()
    assert gpus.allocate([["GPU-1::2", "GPU-0::0", "GPU-1::0"], ["GPU-0::1"], []]) == (
        advertised.ContainerResponse(environment={"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-0"}),
        advertised.ContainerResponse(environment={"NVIDIA_VISIBLE_DEVICES": "GPU-0"}),
        advertised.ContainerResponse(),
    )
    assert gpus.allocated == 4
    assert gpus.host_paths([["GPU-1::2"]]) == ()
    assert gpus.optional_paths([["GPU-1::2"]]) == ()


def test_required_and_optional_host_paths_are_known_before_the_allocation() -> None:
    options = config_gpus.ContainerOptions(device_specs=True, dev_root="/host")
    gpus = allocator(config_gpus.Gpus(given=options))
    requested = [["GPU-1::2", "GPU-1::0", "GPU-0::0"]]
    assert gpus.host_paths(requested) == ("/host/dev/nvidia1", "/host/dev/nvidia0")
    optional = gpus.optional_paths(requested)
    assert optional == tuple(f"/host{path}" for path in CONTROL)
    (answer,) = gpus.allocate(requested, present=frozenset(optional[:2]))
    paths = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1", "/dev/nvidia0"]
    assert [device.container_path for device in answer.devices] == paths


def test_an_annotation_reaches_the_kubelet() -> None:
    options = config_gpus.ContainerOptions(device_list=(config_gpus.DeviceList.CDI_ANNOTATIONS,))
    gpus = allocator(config_gpus.Gpus(given=options))
    name = "k8s.device-plugin.nvidia.com/gpu=GPU-0"
    answers = gpus.allocate([["GPU-0::1"]], annotation="5f0c")
    assert protobuf.allocated(answers) == dp.AllocateResponse(
        container_responses=[
            dp.ContainerAllocateResponse(annotations={"cdi.k8s.io/nvidia-device-plugin_5f0c": name})
        ]
    )


@pytest.mark.parametrize(
    ("rules_", "requested", "problem"),
    [
        (
            config_gpus.Gpus(sharing=config_gpus.Sharing(one_per_request=True)),
            ["GPU-0::0", "GPU-1::0"],
            "maximum request size for shared resources is 1; found 2",
        ),
        (
            config_gpus.Gpus(placement=config_gpus.Placement.EXCLUSIVE),
            ["GPU-0::0", "GPU-0::1"],
            "placement is exclusive and allows one replica of each GPU; found 2 of GPU-0",
        ),
        (
            config_gpus.Gpus(
                given=config_gpus.ContainerOptions(
                    imex=config_gpus.Imex(channels=(0,), required=True)
                )
            ),
            ["GPU-0::0"],
            "IMEX channel 0 is required",
        ),
        (config_gpus.Gpus(), ["GPU-0::9"], "nvidia.com/gpu has no device 'GPU-0::9'; it has GPU-0"),
    ],
)
def test_an_invalid_request_is_refused_in_words_and_allocates_nothing(
    rules_: config_gpus.Gpus, requested: list[str], problem: str
) -> None:
    gpus = allocator(rules_)
    with pytest.raises(advertised.AllocationError) as caught:
        gpus.allocate([["GPU-1::2"], requested])
    assert problem in str(caught.value)
    assert gpus.allocated == 0


def test_preferred_ids_follow_the_policy_and_the_kubelets_offers() -> None:
    left = ["GPU-0::1", "GPU-0::2", "GPU-1::0", "GPU-1::1", "GPU-1::2"]
    advised = {
        policy: allocator(config_gpus.Gpus(placement=policy)).prefer(left, [], 2)
        for policy in config_gpus.Placement
    }
    assert advised == {
        config_gpus.Placement.ALIGNED: ["GPU-1::0", "GPU-0::1"],
        config_gpus.Placement.DISTRIBUTED: ["GPU-1::0", "GPU-0::1"],
        config_gpus.Placement.PACKED: ["GPU-0::1", "GPU-0::2"],
        config_gpus.Placement.EXCLUSIVE: ["GPU-1::0", "GPU-0::1"],
    }
    exclusive = allocator(config_gpus.Gpus(placement=config_gpus.Placement.EXCLUSIVE))
    assert exclusive.prefer(left, ["GPU-0::1"], 3) == ["GPU-0::1", "GPU-1::0"]
