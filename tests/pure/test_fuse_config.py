import msgspec
import pytest

from muster.service import settings
from muster_fuse import config


def read(**tree: object) -> config.Settings:
    return settings.validate(config.Settings, tree, source="fuse.yaml")


def test_without_settings_pods_of_every_namespace_may_have_volumes() -> None:
    chosen = read()
    assert chosen == config.Settings()
    assert (chosen.namespaces, chosen.state, chosen.kubelet.directory) == (
        ("*",),
        "/var/lib/muster-fuse",
        "/var/lib/kubelet",
    )


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"namespaces": []}, "namespaces: expected a list of at least 1 item, found 0"),
        ({"namespaces": [""]}, "namespaces[0]: expected a string of at least 1 character, found 0"),
        ({"pods_max": 0}, "pods_max: expected a whole number of at least 1, found 0"),
        ({"state": "muster"}, "state: 'muster' is not an absolute path without a final slash"),
        ({"helper": "/opt/"}, "helper: '/opt/' is not an absolute path without a final slash"),
        (
            {"kubelet": {"directory": ""}},
            "kubelet.directory: '' is not an absolute path without a final slash",
        ),
        (
            {"namespace": ["team"]},
            "namespace: unknown key (value ['team']); did you mean namespaces?",
        ),
    ],
)
def test_bad_settings_are_named_with_their_key(tree: dict[str, object], problem: str) -> None:
    with pytest.raises(settings.BadSettings) as refused:
        read(**tree)
    assert refused.value.problems == [f"fuse.yaml: {problem}"]


def test_the_hash_is_of_what_pods_get_and_not_of_where_the_bus_is() -> None:
    plain = config.Settings()
    assert msgspec.structs.replace(plain, node="node-b").hash == plain.hash
    for changed in (
        {"namespaces": ("team",)},
        {"pods_max": 7},
        {"limits": config.Limits(mounts_per_pod=3)},
    ):
        assert msgspec.structs.replace(plain, **changed).hash != plain.hash
