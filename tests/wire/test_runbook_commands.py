"""The commands of the runbooks run as they are written; the cluster is a stand-in."""

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from muster import vocabulary
from tests.worlds import manifests, muster_in_cluster, runbook_commands
from tests.worlds.muster_in_cluster import World

NODE: Final = "node-a"
EVENT: Final = vocabulary.PluginStopping(
    node=NODE,
    plugin="device-plugin",
    at=datetime.now(UTC),
    reason=vocabulary.StopReason.UPGRADE,
)
DEAD_LETTER: Final = "muster.dlq.notification.ops.0123.4567"
RUN: Final = manifests.ROOT / "tests/golden/runbook_commands.txt"
"""The commands that are run, sorted."""
BLOCKS_NOT_RUN: Final = {
    "on the node": 43,
    "it prints nothing on a node without a plugin": 1,
    "needs metrics-server": 3,
    "only with the components fuse-nri and fuse-dra": 2,
}
"""The number of commands in blocks that cannot run here, by the reason that the page gives."""
SENTENCES_NOT_RUN: Final = {
    "kubectl -n muster rollout undo daemonset/muster-plugin": "the stand-in has no revisions",
    "kubectl -n NAMESPACE delete pod NAME": "the pod is the reader's",
    'kubectl drain "$NODE" --ignore-daemonsets': "the stand-in has no evictions",
    "helm -n muster get values muster --revision NUMBER": "no Helm",
    'muster --context "$CONTEXT" why "$NODE" RESOURCE': "the resource is the reader's",
    'muster --context "$CONTEXT" doctor': "it fails here, as not all of muster runs",
    'muster --context "$CONTEXT" notify test NAME': "the receiver is the reader's",
}
"""Commands in sentences that are only parsed, with the reason."""


def test_every_command_that_a_cluster_can_run_succeeds(tmp_path: Path) -> None:
    lines = [line for line in runbook_commands.lines() if not line.why]
    lines += [line for line in runbook_commands.inline() if line.text not in SENTENCES_NOT_RUN]
    ordered = sorted(lines, key=lambda line: line.is_change)
    texts = tuple(dict.fromkeys(line.text for line in ordered))

    async def story() -> str:
        async with asyncio.timeout(100), cluster(tmp_path) as world:
            return await problems(world, texts, tmp_path)

    assert asyncio.run(story()) == ""
    assert sorted(texts) == RUN.read_text("utf-8").splitlines()


def test_what_cannot_run_here_says_why_and_has_valid_options() -> None:
    blocks = [line for line in runbook_commands.lines() if line.why and not line.variable]
    assert Counter(line.why for line in blocks) == BLOCKS_NOT_RUN
    assert {line.text for line in runbook_commands.inline()} >= SENTENCES_NOT_RUN.keys()
    commands = {line.text for line in blocks} | SENTENCES_NOT_RUN.keys()
    # kubectl refuses unknown options even with --help
    asked = [
        " --help -- ".join(command.split(" -- ")) if " -- " in command else f"{command} --help"
        for command in (each.partition(" |")[0] for each in commands)
        if command.startswith("kubectl ")
    ]
    on_nodes = "\n".join(commands - {command for command in commands if "kubectl" in command})
    script = "".join(f"{command} >/dev/null\n" for command in asked)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for options, text in (("-ec", f"NODE=node-a\n{script}"), ("-nc", on_nodes)):
        done = subprocess.run(
            ["/bin/bash", options, text],
            env={"PATH": path},
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")


SHELL: Final = """
coproc FORKS { exec "$PYTHON" "$FORKED_MUSTER"; }
# a pipe's part of the shell does not have the descriptors of the coprocess
exec 8>&"${FORKS[1]}" 9<&"${FORKS[0]}"
muster() {
    local code
    printf '%q ' "$PWD/said" "$@" >&8
    echo >&8
    read -r code <&9
    cat said
    return "$code"
}
"""
"""Runs all `muster` commands by one process, as each would need most of its time for imports."""


async def problems(world: World, lines: tuple[str, ...], where: Path) -> str:
    """Run lines in one shell; return the output of those that failed."""
    script = "".join(
        f"{line}\n"
        if runbook_commands.Line("", line).variable
        else f"{{ {line}; }} > out 2>&1 || {{ echo {shlex.quote(line)}; cat out; }}\n"
        for line in lines
    )
    process = await asyncio.create_subprocess_exec(
        "/bin/bash", "-u", "-o", "pipefail", "-c", SHELL + script,
        cwd=where,
        env={
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "FORKED_MUSTER": str(manifests.ROOT / "tests/programs/forked_muster.py"),
            "HOME": str(where),
            "KUBECONFIG": str(world.kubeconfig),
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return out.decode()


@contextlib.asynccontextmanager
async def cluster(where: Path) -> AsyncIterator[World]:
    """Run a cluster with one node, muster's workloads, and health and NATS that answer."""
    async with (
        muster_in_cluster.empty(where) as world,
        muster_in_cluster.health(world, 0),
        muster_in_cluster.passwords(world, where) as url,
        muster_in_cluster.connected(url) as link,
    ):
        named = {"metadata": {"name": NODE}}
        await create(world, "/api/v1/nodes", named)
        lease = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        await create(world, lease, named)
        for item in manifests.objects("minimal"):
            if item["kind"] == "ConfigMap":
                await world.create("configmaps", item)
            if item["kind"] in {"DaemonSet", "Deployment"}:
                workloads = f"/apis/apps/v1/namespaces/muster/{item['kind'].lower()}s"
                await create(world, workloads, item)
                await start(world, item)
        await link.publish(EVENT)
        client = await link.link.client()
        headers = {"Muster-Receiver": "ops", "Muster-Error": "HTTP 400"}
        await client.jetstream().publish(DEAD_LETTER, b"{}", headers=headers)
        yield world


async def start(world: World, workload: dict[str, Any]) -> None:
    """Create a pod of a workload on the node, and set the status of the workload to complete."""
    name, template = workload["metadata"]["name"], workload["spec"]["template"]
    if workload["kind"] == "DaemonSet":
        path = f"/apis/apps/v1/namespaces/muster/daemonsets/{name}/status"
        status = {
            "currentNumberScheduled": 1,
            "desiredNumberScheduled": 1,
            "numberAvailable": 1,
            "numberReady": 1,
            "observedGeneration": 1,
            "updatedNumberScheduled": 1,
        }
        answer = await world.api.request(
            "PATCH", path, body={"status": status},
            content="application/merge-patch+json", timeout_s=10,
        )  # fmt: skip
        assert answer.is_ok, answer.problem
    if name != "muster-health":
        pod = {"name": f"{name}-x", "labels": template["metadata"]["labels"]}
        spec = {**template["spec"], "nodeName": NODE}
        await world.create(
            "pods", {"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": spec}
        )
        await world.status(f"{name}-x", {"phase": "Running"})


async def create(world: World, path: str, tree: dict[str, Any]) -> None:
    answer = await world.api.request("POST", path, body=tree, timeout_s=10)
    assert answer.is_ok, answer.problem
