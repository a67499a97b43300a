"""A cluster without a default StorageClass: the documented steps fail, and say what is missing."""

import pytest

from tests.worlds import real_cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_the_steps_fail_and_say_that_the_class_is_missing(
    cluster: real_cluster.Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("no-storage")
    cluster.prepare(folder)
    cluster.shell(real_cluster.passwords(), folder)
    steps = real_cluster.block("install.md", "kubectl apply -k my-muster")
    with cluster.no_default_storage():
        printed = cluster.shell(steps.replace("--timeout=180s", "--timeout=5s"), folder, expect=1)
        assert printed.splitlines()[-2:] == [
            "Waiting for 1 pods to be ready...",
            "error: timed out waiting for the condition",
        ]
        diagnosis = cluster.shell(
            real_cluster.block("install.md", "check muster"), folder, expect=1
        )
        assert (
            "ERROR    RUN002   muster/data-muster-nats-0: NATS has no volume: "
            "the claim names no StorageClass, and none is the default" in diagnosis.splitlines()
        )
    # with a default class again, everything starts by itself
    waits = [line for line in steps.splitlines() if "rollout status" in line]
    assert len(waits) == 3
    cluster.shell("\n".join(waits), folder)
    assert cluster.shell("muster check muster", folder).count("nothing found") == 1
