"""docs/install.md followed word for word: the overlay gpu, with the stand-in for NVML."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from scripts.cluster import layout
from tests.worlds import real_cluster
from tests.worlds.nvml import fake, scenes
from tests.worlds.real_cluster import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GPU: Final = "nvidia.com/gpu"
FOLDER: Final = layout.STATE / "nvml"
"""The directory of the stand-in, at the same path in the node."""
THERE: Final = "/opt/nvml"
"""The same directory in the plugin's container."""
RUNTIME: Final = {
    "apiVersion": "node.k8s.io/v1",
    "kind": "RuntimeClass",
    "metadata": {"name": "nvidia"},
    "handler": "runc",
}


def _mounted(library: Path, state: Path) -> dict[str, Any]:
    """Return the patch that makes the plugin load the stand-in instead of NVML."""
    container = "/spec/template/spec/containers/0"
    variables = {
        "LD_LIBRARY_PATH": f"{THERE}/{library.parent.relative_to(FOLDER)}",
        fake.STATE: f"{THERE}/{state.relative_to(FOLDER)}",
    }
    operations = [
        {
            "op": "add",
            "path": "/spec/template/spec/volumes/-",
            "value": {"name": "nvml", "hostPath": {"path": str(FOLDER), "type": "Directory"}},
        },
        {
            "op": "add",
            "path": f"{container}/volumeMounts/-",
            "value": {"name": "nvml", "mountPath": THERE, "readOnly": True},
        },
        *(
            {"op": "add", "path": f"{container}/env/-", "value": {"name": name, "value": value}}
            for name, value in variables.items()
        ),
    ]
    target = {"kind": "DaemonSet", "name": "muster-plugin"}
    return {"patches": [{"target": target, "patch": yaml.safe_dump(operations)}]}


@pytest.fixture(scope="module")
def gpus() -> Iterator[tuple[fake.Fake, Path]]:
    try:
        library = fake.built(FOLDER)
    except fake.NoCompiler as error:
        pytest.skip(str(error))
    made = fake.Fake(FOLDER / "state")
    made.write(scenes.h100x8())
    yield made, library
    shutil.rmtree(FOLDER)


@pytest.fixture(scope="module")
def installed(
    cluster: real_cluster.Cluster,
    gpus: tuple[fake.Fake, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[real_cluster.Cluster]:
    if Path(cluster.kubeconfig) != layout.KUBECONFIG:
        pytest.skip("only the cluster of make cluster sees the stand-in for NVML")
    made, library = gpus
    folder = tmp_path_factory.mktemp("gpu")
    cluster.prepare(folder, overlay="gpu", more=_mounted(library, made.state_file))
    cluster.good("create", "-f", "-", given=RUNTIME)
    try:
        cluster.shell(real_cluster.passwords(), folder)
        cluster.shell(real_cluster.block("install.md", "apply -k my-muster"), folder)
        yield cluster
    finally:
        cluster.rest()
        cluster.good("delete", "runtimeclass", "nvidia")
        cluster.renew_node()


def test_the_node_offers_every_gpu_and_loses_one(
    installed: real_cluster.Cluster, gpus: tuple[fake.Fake, Path]
) -> None:
    until(lambda: installed.allocatable(GPU) == "8", "the node offers 8 GPUs")
    printed = installed.run_pod({GPU: "2"}, "echo $NVIDIA_VISIBLE_DEVICES")
    chosen = printed.strip().split(",")
    assert len(chosen) == 2
    # NVIDIA's container runtime adds the GPUs that the variable names
    assert {*chosen} <= {gpu.uuid for gpu in scenes.h100x8().gpus}
    made, _ = gpus
    made.xid(0, 79)
    until(lambda: installed.allocatable(GPU) == "7", "the GPU with XID 79 is not offered")
