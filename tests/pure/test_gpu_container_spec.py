import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_plugin.config import gpus
from muster_plugin.gpu import container_spec
from muster_plugin.model import advertised, gpu

ENVVAR, MOUNTS, ANNOTATIONS, CRI = gpus.DeviceList
CONTROL = frozenset(container_spec.CONTROL_NODES)
CHANNEL = "/dev/nvidia-caps-imex-channels/channel0"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
KEY = "cdi.k8s.io/nvidia-device-plugin_id"
CDI = "k8s.device-plugin.nvidia.com"
CAPS = {"gpu3/gi5/access": 30, "gpu3/gi5/ci0/access": 31}


def device(number: int) -> gpu.Device:
    """Return a GPU whose minor number differs from its index."""
    name = f"GPU-{number}"
    return gpu.Device(part=gpu.Part(gpu=name), uuid=name, index=str(number), minor=number + 2)


MIG = gpu.Device(part=gpu.Part(gpu="GPU-1", gi=5, ci=0), uuid="MIG-1", index="1:4", minor=3)


def answer(
    *devices: gpu.Device, to: gpus.ContainerOptions, present: frozenset[str] = frozenset()
) -> advertised.ContainerResponse:
    return container_spec.container_response(
        devices, to, caps=CAPS, present=present, annotation="id"
    )


def given_by(*strategies: gpus.DeviceList) -> gpus.ContainerOptions:
    return gpus.ContainerOptions(device_list=strategies)


def mount(name: str) -> advertised.Mount:
    below = f"/var/run/nvidia-container-devices/{name}"
    return advertised.Mount(host_path="/dev/null", container_path=below, read_only=False)


def node(path: str, root: str = "") -> advertised.DeviceSpec:
    return advertised.DeviceSpec(host_path=root + path, container_path=path, permissions="rw")


# The responses of NVIDIA's plugin for each strategy (k8s-device-plugin 1b826ac, server.go)


@pytest.mark.parametrize(
    ("strategies", "result"),
    [
        ((ENVVAR,), advertised.ContainerResponse(environment={VISIBLE: "GPU-1,GPU-0"})),
        (
            (MOUNTS,),
            advertised.ContainerResponse(
                environment={VISIBLE: "/var/run/nvidia-container-devices"},
                mounts=(mount("GPU-1"), mount("GPU-0")),
            ),
        ),
        (
            (ANNOTATIONS,),
            advertised.ContainerResponse(annotations={KEY: f"{CDI}/gpu=GPU-1,{CDI}/gpu=GPU-0"}),
        ),
        (
            (CRI,),
            advertised.ContainerResponse(cdi_devices=(f"{CDI}/gpu=GPU-1", f"{CDI}/gpu=GPU-0")),
        ),
        (
            (ENVVAR, CRI),
            advertised.ContainerResponse(
                environment={VISIBLE: "GPU-1,GPU-0"},
                cdi_devices=(f"{CDI}/gpu=GPU-1", f"{CDI}/gpu=GPU-0"),
            ),
        ),
        (
            (CRI, ANNOTATIONS, MOUNTS, ENVVAR),
            advertised.ContainerResponse(
                environment={VISIBLE: "/var/run/nvidia-container-devices"},
                mounts=(mount("GPU-1"), mount("GPU-0")),
                annotations={KEY: f"{CDI}/gpu=GPU-1,{CDI}/gpu=GPU-0"},
                cdi_devices=(f"{CDI}/gpu=GPU-1", f"{CDI}/gpu=GPU-0"),
            ),
        ),
    ],
)
def test_each_strategy_reports_the_runtime_in_its_own_way(
    strategies: tuple[gpus.DeviceList, ...], result: advertised.ContainerResponse
) -> None:
    assert answer(device(1), device(0), to=given_by(*strategies)) == result


def test_devices_can_be_reported_by_index() -> None:
    by_index = gpus.ContainerOptions(device_list=(MOUNTS, CRI), device_ids=gpus.DeviceIds.INDEX)
    assert answer(MIG, device(0), to=by_index) == advertised.ContainerResponse(
        environment={VISIBLE: "/var/run/nvidia-container-devices"},
        mounts=(mount("1:4"), mount("0")),
        cdi_devices=(f"{CDI}/gpu=1:4", f"{CDI}/gpu=0"),
    )


# server_test.go, de-duplication; iktos 9394ddf replica_test.go stripReplicas, which sorts as well


@pytest.mark.parametrize(
    ("requested", "result"),
    [
        ([1, 0, 0], "GPU-1,GPU-0"),
        ([1, 0, 0, 2], "GPU-1,GPU-0,GPU-2"),
        ([0, 1, 0, 1], "GPU-0,GPU-1"),
    ],
)
def test_replicas_of_a_gpu_give_it_once_in_the_order_asked_for(
    requested: list[int], result: str
) -> None:
    devices = [device(number) for number in requested]
    assert answer(*devices, to=given_by(ENVVAR)).environment == {VISIBLE: result}
    by_index = gpus.ContainerOptions(device_ids=gpus.DeviceIds.INDEX)
    assert answer(*devices, to=by_index).environment == {VISIBLE: result.replace("GPU-", "")}


# server_test.go TestCDIAllocateResponse


@pytest.mark.parametrize(
    ("requested", "to", "present", "key", "names"),
    [
        ([0], gpus.ContainerOptions(), (), KEY, "gpu=GPU-0"),
        (
            [0],
            gpus.ContainerOptions(cdi_annotation_prefix="custom.cdi.k8s.io/"),
            (),
            "custom.cdi.k8s.io/nvidia-device-plugin_id",
            "gpu=GPU-0",
        ),
        ([0, 1], gpus.ContainerOptions(), (), KEY, "gpu=GPU-0 gpu=GPU-1"),
        (
            [0, 1],
            gpus.ContainerOptions(cdi_annotation_prefix="custom.cdi.k8s.io/"),
            (),
            "custom.cdi.k8s.io/nvidia-device-plugin_id",
            "gpu=GPU-0 gpu=GPU-1",
        ),
        ([], gpus.ContainerOptions(mofed=True), (), KEY, "mofed=all"),
        ([], gpus.ContainerOptions(gds=True), (), KEY, "gds=all"),
        ([0], gpus.ContainerOptions(gds=True, mofed=True), (), KEY, "gpu=GPU-0 gds=all mofed=all"),
        (
            [],
            gpus.ContainerOptions(imex=gpus.Imex(channels=(0,))),
            (CHANNEL,),
            KEY,
            "imex-channel=0",
        ),
        (
            [0],
            gpus.ContainerOptions(gdrcopy=True, gds=True, imex=gpus.Imex(channels=(0,))),
            (CHANNEL,),
            KEY,
            "gpu=GPU-0 imex-channel=0 gdrcopy=all gds=all",
        ),
    ],
)
def test_cdi_names_what_a_container_gets(
    requested: list[int], to: gpus.ContainerOptions, present: tuple[str, ...], key: str, names: str
) -> None:
    expected_text = gpus.ContainerOptions(
        device_list=(ANNOTATIONS,),
        cdi_annotation_prefix=to.cdi_annotation_prefix,
        gdrcopy=to.gdrcopy,
        gds=to.gds,
        mofed=to.mofed,
        imex=to.imex,
    )
    value = ",".join(f"{CDI}/{name}" for name in names.split())
    devices = [device(number) for number in requested]
    result = answer(*devices, to=expected_text, present=frozenset(present))
    features = [name for name in ("gdrcopy", "gds", "mofed") if getattr(to, name)]
    assert result == advertised.ContainerResponse(
        annotations={key: value},
        environment={f"NVIDIA_{name.upper()}": "enabled" for name in features},
    )


def test_no_device_is_no_annotation() -> None:
    assert answer(to=given_by(ANNOTATIONS, CRI)) == advertised.ContainerResponse()


@pytest.mark.parametrize(("strategy", "visible"), [(ENVVAR, {VISIBLE: "GPU-0"}), (CRI, {})])
def test_features_are_variables_whatever_else_comes_by_cdi(
    strategy: gpus.DeviceList, visible: dict[str, str]
) -> None:
    features = {
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
    }
    options = gpus.ContainerOptions(device_list=(strategy,), gdrcopy=True, gds=True, mofed=True)
    assert answer(device(0), to=options).environment == {**visible, **features}


# Device nodes


def test_nodes_are_given_by_minor_number_below_the_dev_root_and_control_nodes_if_present() -> None:
    expected_text = gpus.ContainerOptions(device_specs=True, driver_root="/run/nvidia/driver")
    present = frozenset({"/run/nvidia/driver/dev/nvidiactl", "/run/nvidia/driver/dev/nvidia-uvm"})
    expected = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3", "/dev/nvidia2")
    assert answer(
        device(1), device(0), device(1), to=expected_text, present=present
    ) == advertised.ContainerResponse(
        environment={VISIBLE: "GPU-1,GPU-0"},
        devices=tuple(node(path, "/run/nvidia/driver") for path in expected),
    )


def test_the_dev_root_may_be_another_than_the_driver_root() -> None:
    expected_text = gpus.ContainerOptions(
        device_specs=True, driver_root="/run/nvidia/driver", dev_root="/"
    )
    assert answer(device(0), to=expected_text, present=CONTROL).devices == (
        *(node(path) for path in container_spec.CONTROL_NODES),
        node("/dev/nvidia2"),
    )


def test_a_mig_device_comes_with_its_capability_nodes() -> None:
    expected_text = gpus.ContainerOptions(device_specs=True)
    assert answer(MIG, to=expected_text).devices == (
        node("/dev/nvidia3"),
        node("/dev/nvidia-caps/nvidia-cap30"),
        node("/dev/nvidia-caps/nvidia-cap31"),
    )


def test_nodes_are_not_given_beside_cdi_alone() -> None:
    expected_text = gpus.ContainerOptions(device_specs=True, device_list=(ANNOTATIONS, CRI))
    assert answer(device(0), to=expected_text, present=CONTROL).devices == ()
    assert container_spec.optional_paths(expected_text) == ()


def test_what_is_searched_is_what_may_be_left_out() -> None:
    expected_text = gpus.ContainerOptions(
        device_specs=True, dev_root="/host", imex=gpus.Imex(channels=(0,))
    )
    assert container_spec.optional_paths(expected_text) == (
        "/host/dev/nvidiactl",
        "/host/dev/nvidia-uvm",
        "/host/dev/nvidia-uvm-tools",
        "/host/dev/nvidia-modeset",
        f"/host{CHANNEL}",
    )
    assert container_spec.optional_paths(gpus.ContainerOptions()) == ()


# IMEX


def test_an_imex_channel_that_is_there_gets_in_every_way() -> None:
    expected_text = gpus.ContainerOptions(device_specs=True, imex=gpus.Imex(channels=(0,)))
    there = frozenset({CHANNEL})
    assert answer(device(0), to=expected_text, present=there) == advertised.ContainerResponse(
        environment={VISIBLE: "GPU-0", "NVIDIA_IMEX_CHANNELS": "0"},
        devices=(node("/dev/nvidia2"), node(CHANNEL)),
    )
    mounted = gpus.ContainerOptions(device_list=(MOUNTS,), imex=gpus.Imex(channels=(0,)))
    assert answer(device(0), to=mounted, present=there).mounts == (mount("GPU-0"), mount("imex/0"))


def test_an_imex_channel_that_is_not_there_is_left_out_or_missed() -> None:
    wanted = gpus.ContainerOptions(imex=gpus.Imex(channels=(0,)))
    needed = gpus.ContainerOptions(imex=gpus.Imex(channels=(0,), required=True))
    assert answer(device(0), to=wanted).environment == {VISIBLE: "GPU-0"}
    assert container_spec.missing_channel(wanted, ()) == ""
    assert container_spec.missing_channel(needed, {CHANNEL}) == ""
    expected_text = f"IMEX channel 0 is required, but {CHANNEL} is absent"
    assert container_spec.missing_channel(needed, ()) == expected_text


# Requests that are refused


def unit(name: str, minor: int | None = 0) -> advertised.Unit:
    physical = name.split("::", maxsplit=1)[0]
    item = gpu.Device(part=gpu.Part(gpu=physical), uuid=physical, index="0", minor=minor)
    return advertised.Unit(id=name, physical=physical, identity={0: physical}, gpu=item)


def problem(names: str, rules: gpus.Gpus) -> str:
    terms = container_spec.AllocationContext(rules=rules)
    return container_spec.request_problem(
        "nvidia.com/gpu", [unit(name) for name in names.split()], terms
    )


ONE = gpus.Gpus(sharing=gpus.Sharing(one_per_request=True))
TOO_MANY = (
    'invalid allocation request for "nvidia.com/gpu": invalid request: '
    "maximum request size for shared resources is 1; found 2"
)


# internal/rm/rm_test.go TestValidateRequest, but for unknown ids and MPS


@pytest.mark.parametrize(
    ("names", "rules", "result"),
    [
        ("device1", gpus.Gpus(), ""),
        ("device0::1", gpus.Gpus(), ""),
        ("device0::1 device1::0", gpus.Gpus(), ""),
        ("device0::1", ONE, ""),
        ("device0::1 device1::0", ONE, TOO_MANY),
        ("device0 device1", ONE, ""),
    ],
)
def test_more_than_one_replica_is_refused_where_one_is_the_most(
    names: str, rules: gpus.Gpus, result: str
) -> None:
    assert problem(names, rules) == result


def test_two_replicas_of_one_gpu_are_refused_where_placement_is_exclusive() -> None:
    rules = gpus.Gpus(placement=gpus.Placement.EXCLUSIVE)
    assert problem("a::0 b::0", rules) == ""
    assert problem("a::0 b::0 a::1", rules) == (
        'invalid allocation request for "nvidia.com/gpu": invalid request: '
        "placement is exclusive and allows one replica of each GPU; found 2 of a"
    )


def test_a_device_without_a_known_node_is_refused_only_where_nodes_are_given() -> None:
    with_nodes = container_spec.AllocationContext(
        rules=gpus.Gpus(given=gpus.ContainerOptions(device_specs=True))
    )
    nameless = unit("a", minor=None)
    mig = advertised.Unit(id="MIG-1", physical="MIG-1", identity={0: "MIG-1"}, gpu=MIG)
    assert container_spec.request_problem("r", [nameless], container_spec.AllocationContext()) == ""
    expected_text = "a of r cannot be allocated: the minor number of its device node is unknown"
    assert container_spec.request_problem("r", [nameless], with_nodes) == expected_text
    expected_text = (
        "MIG-1 of r cannot be allocated: "
        "/proc/driver/nvidia-caps/mig-minors does not list gpu3/gi5/access"
    )
    assert container_spec.request_problem("r", [mig], with_nodes) == expected_text


@given(
    st.lists(st.sampled_from([device(0), device(1), MIG])),
    st.builds(
        gpus.ContainerOptions,
        device_list=st.permutations([*gpus.DeviceList]).map(lambda all_: tuple(all_[:2])),
        device_ids=st.sampled_from(gpus.DeviceIds),
        device_specs=st.booleans(),
        gds=st.booleans(),
        imex=st.sampled_from([gpus.Imex(), gpus.Imex(channels=(0,))]),
    ),
    st.frozensets(st.sampled_from([*CONTROL, CHANNEL])),
)
def test_nothing_that_is_absent_and_nothing_twice_gets(
    devices: list[gpu.Device], expected_text: gpus.ContainerOptions, present: frozenset[str]
) -> None:
    result = answer(*devices, to=expected_text, present=present)
    paths = [item.host_path for item in result.devices]
    needed = [
        item.host_path for item in container_spec.device_nodes(devices, expected_text, caps=CAPS)
    ]
    assert len(set(paths)) == len(paths)
    assert set(paths) <= {*present, *needed}
    assert len(set(result.cdi_devices)) == len(result.cdi_devices)
