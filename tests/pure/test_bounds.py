"""Libraries whose internals muster uses: only the known versions are installed and allowed."""

import importlib.metadata
import tomllib

import pytest
from packaging import requirements, utils

from muster.kubernetes import client
from muster.nats import compat
from muster.service import validation
from tests.worlds import manifests

KNOWN = {
    "kubernetes": (client.KNOWN, "muster/kubernetes/client.py"),
    "msgspec": (validation.MSGSPEC_KNOWN, "muster/service/validation.py"),
    "nats-py": (compat.KNOWN, "muster/nats/compat.py"),
}


def declared(library: str) -> list[requirements.Requirement]:
    project = tomllib.loads((manifests.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        lines += extra
    parsed = map(requirements.Requirement, lines)
    return [
        requirement
        for requirement in parsed
        if utils.canonicalize_name(requirement.name) == library
    ]


def after(version: str) -> str:
    """Return the version that follows all of `version`.*, such as 1.3 for 1.2."""
    *rest, last = version.split(".")
    return ".".join([*rest, str(int(last) + 1)])


@pytest.mark.parametrize("library", KNOWN)
def test_the_installed_version_is_the_one_whose_insides_are_known(library: str) -> None:
    known, module = KNOWN[library]
    installed = importlib.metadata.version(library)
    assert installed.startswith(f"{known}."), (
        f"{library} {installed} is installed, and {module} relies on insides of {known}: "
        f"read them again in {installed}, adapt the module, then raise the version it names"
    )


@pytest.mark.parametrize("library", KNOWN)
def test_no_later_version_is_allowed_than_the_one_that_is_known(library: str) -> None:
    known, module = KNOWN[library]
    assert declared(library), f"pyproject.toml does not name {library}"
    for requirement in declared(library):
        assert f"{known}.0" in requirement.specifier, (
            f"{requirement} excludes {known}, which {module} relies on"
        )
        assert after(known) not in requirement.specifier, (
            f"{requirement} allows {after(known)}, and {module} relies on insides of {known}: "
            "raise both together, or neither"
        )
