"""`muster label-gpus` and `unlabel-gpus` against the API stand-in."""

import datetime as dt
import os
import pathlib
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from muster.local.kubernetes import refusals
from muster.vocabulary import Verdict
from muster_labeler import model
from muster_labeler.naming.sources import Product
from muster_labeler.service import decision_publisher
from tests.worlds import labeler_cluster as clusters
from tests.worlds import muster_command
from tests.worlds.labeler_cluster import GFD, KEY, Cluster, node

T4 = {GFD: "Tesla-T4"}
L4 = {GFD: "NVIDIA-L4"}
DOKS = "doks.digitalocean.com/gpu-model"
DO = {DOKS: "h100"}
"""Labels that muster reads and SkyPilot does not, so that they cover no node for SkyPilot."""


@pytest.fixture
def here(tmp_path: pathlib.Path) -> Iterator[Cluster]:
    with clusters.cluster(tmp_path) as cluster:
        yield cluster


def test_without_apply_it_shows_and_writes_nothing(here: Cluster) -> None:
    here.put(node("a", labels=DO), node("b", labels=DO))
    code, out, errors = here.run("label-gpus")
    assert (code, out.splitlines()) == (
        0,
        [
            "NODE  GPU                                   SOURCE       CURRENT  NEW   REASON",
            "a     doks.digitalocean.com/gpu-model=h100  cloud label  -        h100  exact",
            "b     doks.digitalocean.com/gpu-model=h100  cloud label  -        h100  exact",
            "2 to write",
        ],
    )
    assert errors == "muster label-gpus: 2 nodes would be written; --apply writes them\n"
    assert KEY not in here.labels("a")


def test_apply_writes_reads_back_and_says_where_the_name_came_from(here: Cluster) -> None:
    here.put(node("a", labels=DO))
    code, out, _ = here.run("label-gpus", "--apply", "--yes")
    assert (code, out.splitlines()[-1]) == (
        0,
        "labels changed on 1 of 1 node, and read back to verify",
    )
    metadata = here.node("a")["metadata"]
    assert metadata["labels"] == {**DO, KEY: "h100"}
    provenance = orjson.loads(metadata["annotations"][model.PROVENANCE])
    assert {key: provenance[key] for key in ("key", "value", "source", "product")} == {
        "key": KEY,
        "value": "h100",
        "source": "cloud label",
        "product": "doks.digitalocean.com/gpu-model=h100",
    }
    assert provenance["actor"].endswith("with muster label-gpus")
    assert "previous" not in provenance
    code, out, _ = here.run("label-gpus", "--apply", "--yes")
    assert (code, out.splitlines()[1:]) == (
        0,
        [
            f"a     {DOKS}=h100  cloud label  h100     h100  labelled already",
            "1 unchanged",
        ],
    )


def test_where_there_is_no_terminal_nobody_is_asked_and_nothing_written(
    here: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.put(node("a", labels=DO))
    with pathlib.Path("/dev/null").open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        code, _, errors = here.run("label-gpus", "--apply")
    question = f"Label 1 node of {here.api.url} (context muster)?"
    reason = "stdin is not a terminal; use --yes"
    assert (code, errors) == (2, f"muster label-gpus: {question} {reason}\n")
    assert KEY not in here.labels("a")


@pytest.mark.parametrize(("answer", "label", "code"), [(b"y\n", "h100", 0), (b"\n", None, 1)])
def test_on_a_terminal_a_person_is_asked(
    here: Cluster, answer: bytes, label: str | None, code: int
) -> None:
    here.put(node("a", labels=DO))
    ours, theirs = pty.openpty()
    with open(ours, "r+b", buffering=0) as terminal, open(theirs, "rb", buffering=0) as stdin:  # noqa: PTH123  # descriptors
        terminal.write(answer)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "muster.cli", "label-gpus", "--apply"),
                *("--kubeconfig", here.kubeconfig),
            ],
            stdin=stdin,
            capture_output=True,
            check=False,
        )
    assert (done.returncode, here.labels("a").get(KEY)) == (code, label)
    assert b"Label 1 node of http://127.0.0.1:" in done.stderr


def test_ctrl_c_ends_the_question_at_once(here: Cluster) -> None:
    here.put(node("a", labels=DO))
    ours, theirs = pty.openpty()
    with open(ours, "r+b", buffering=0), open(theirs, "rb", buffering=0) as stdin:  # noqa: PTH123  # descriptors
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "muster.cli", "label-gpus", "--apply"),
                *("--kubeconfig", here.kubeconfig),
            ],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        prompt = b""
        while b"[y/N]" not in prompt:
            prompt += os.read(process.stderr.fileno(), 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        process.stderr.close()
    assert KEY not in here.labels("a")


def test_in_no_second_the_api_gets_more_writes_than_the_rate(here: Cluster) -> None:
    here.put(*(node(f"n{index}", labels=DO) for index in range(30)))
    before = len(here.writes("/api/v1/nodes"))
    assert here.run("label-gpus", "--apply", "--yes", "--rate", "20")[0] == 0
    times = here.writes("/api/v1/nodes")[before:]
    most = max(sum(first <= time < first + 1 for time in times) for first in times)
    assert len(times) == 30
    assert most <= 20


def test_all_gpu_nodes_or_none(here: Cluster) -> None:
    here.put(node("a", labels=DO), node("b", labels=DO), node("c"))
    code, _, errors = here.run("label-gpus", "--apply", "--yes", "--node", "a")
    why = f"2 of 3 GPU nodes would remain without {KEY}, so SkyPilot would not see them: b, c"
    text = f"{why}; pass --partial\n"
    assert (code, errors) == (1, f"muster label-gpus: nothing was written: {text}")
    assert here.run("label-gpus", "--apply", "--yes")[0] == 1
    assert here.labels("a") == DO
    assert here.run("label-gpus", "--apply", "--yes", "--partial")[0] == 1  # c stays unlabelled
    assert [here.labels(name).get(KEY) for name in "abc"] == ["h100", "h100", None]


def test_a_cluster_that_another_scheme_covers_is_left_alone(here: Cluster) -> None:
    here.put(node("a", labels=T4), node("b", labels=L4))
    code, _, errors = here.run("label-gpus", "--apply", "--yes", "--node", "a")
    assert code == 1
    assert errors.startswith(f"muster label-gpus: nothing was written: {GFD} names every GPU node")


def test_what_others_own_is_refused_by_name_and_overwritten_only_on_request(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "l4", **T4}))
    code, out, _ = here.run("label-gpus", "--apply", "--yes")
    assert code == 1
    assert out.splitlines()[1].endswith("l4       (t4)  owned by kubectl; pass --overwrite")
    assert here.labels("a")[KEY] == "l4"
    assert here.run("label-gpus", "--apply", "--yes", "--overwrite")[0] == 0
    assert here.labels("a")[KEY] == "t4"
    provenance = here.node("a")["metadata"]["annotations"][model.PROVENANCE]
    assert orjson.loads(provenance)["previous"] == "l4"
    assert here.run("unlabel-gpus", "--yes")[0] == 0
    assert here.labels("a") == T4


@pytest.mark.parametrize(
    ("labels", "option", "label"),
    [
        ({GFD: "NVIDIA-A100"}, "--force-ambiguous", "a100"),
        ({GFD: "NVIDIA-T400-4GB"}, "--allow-unknown", "t400"),
        ({"node.kubernetes.io/instance-type": "p5.48xlarge"}, "--from-instance-type", "h100"),
    ],
)
def test_what_is_not_certain_is_written_only_on_request(
    here: Cluster, labels: dict[str, str], option: str, label: str
) -> None:
    here.put(node("a", labels=labels))
    code, out, _ = here.run("label-gpus", "--apply", "--yes")
    assert code == 1
    assert option in out
    assert here.run("label-gpus", "--apply", "--yes", option)[0] == 0
    assert here.labels("a")[KEY] == label


def test_a_label_without_a_known_owner_is_not_changed(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "l4", **DO}))
    patch: dict[str, Any] = {"metadata": {"managedFields": [{}]}}
    here.send("PATCH", "/api/v1/nodes/a", patch, "application/merge-patch+json")
    assert "managedFields" not in here.node("a")["metadata"]
    code, out, _ = here.run("label-gpus", "--apply", "--yes")
    assert (code, here.labels("a")[KEY]) == (1, "l4")
    assert "owned by an unknown manager; pass --overwrite" in out
    assert here.run("label-gpus", "--apply", "--yes", "--overwrite")[0] == 0
    assert here.labels("a")[KEY] == "h100"


@pytest.mark.parametrize(
    ("reason", "code"),
    [(refusals.Reason.FORBIDDEN, 4), (refusals.Reason.NOT_FOUND, 3), (refusals.Reason.EXPIRED, 3)],
)
def test_nodes_that_cannot_be_listed_are_no_empty_cluster(
    here: Cluster, reason: refusals.Reason, code: int
) -> None:
    here.put(node("a", labels=DO))
    here.api.refuse("/api/v1/nodes", reason)
    for words in (("label-gpus", "--apply", "--yes"), ("unlabel-gpus", "--yes"), ("check", "gpu")):
        got, _, errors = here.run(*words, "--timeout", "3s")
        assert (words, got) == (words, code)
        assert words[0] == "check" or errors.count("\n") == 1
    assert (
        here.run("check", "all", "--output", "junit", "--timeout", "3s")[1].count("<skipped") >= 1
    )


def test_simulated_gpus_are_labelled_only_on_request(here: Cluster) -> None:
    kinds = {"a": {Product("NVIDIA L4", 23034): 2}}
    here.put(node("a"), clusters.reports(kinds, simulated=frozenset({"a"})))
    words = ("label-gpus", "--apply", "--yes", "--muster-namespace", "default")
    assert here.run(*words)[0] == 1
    assert here.run(*words, "--simulated")[0] == 0
    assert here.labels("a")[KEY] == "l4"


def test_an_alias_that_people_reviewed_is_certain(here: Cluster, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "aliases.yaml"
    file.write_text("NVIDIA-T400-4GB: t400\n")
    here.put(node("a", labels={GFD: "NVIDIA-T400-4GB"}))
    assert here.run("label-gpus", "--apply", "--yes", "--aliases", str(file))[0] == 0
    assert here.labels("a")[KEY] == "t400"
    file.write_text("NVIDIA-T400-4GB: T400!\n")
    code, _, errors = here.run("label-gpus", "--aliases", str(file))
    assert (
        code,
        errors.endswith("'T400!', the name of 'NVIDIA-T400-4GB', is not an accelerator name\n"),
    ) == (
        2,
        True,
    )


def test_unlabel_removes_what_is_ours_and_nothing_else(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "mine", **T4}), node("b", labels=T4))
    here.apply("b", {KEY: "t4", "muster.dev/accelerator-count": "8"})
    code, out, _ = here.run("unlabel-gpus", "--dry-run")
    assert (code, out.splitlines()[1:]) == (
        0,
        [
            f"b     {GFD}=Tesla-T4  GPU feature discovery  t4       (removed)  written by muster",
            f"a     {GFD}=Tesla-T4  GPU feature discovery  mine     mine       owned by kubectl",
            "1 to remove, 1 unchanged",
        ],
    )
    assert here.run("unlabel-gpus", "--yes")[0] == 0
    assert (here.labels("a"), here.labels("b")) == ({KEY: "mine", **T4}, T4)


def test_unlabel_takes_all_that_is_ours_beside_the_labels_of_others(here: Cluster) -> None:
    here.put(node("a", labels={KEY: "mine", **T4}), node("b"), node("c", gpus=None))
    for name in "abc":
        here.apply(name, {"muster.dev/accelerator": "t4", "nvidia.com/gpu.count": "8"})
    here.apply("b", {"muster.dev/accelerator": "t4", KEY: "t4"})
    code, out, _ = here.run("unlabel-gpus", "--yes", "--node", "a", "--node", "b")
    last = "labels changed on 2 of 2 nodes, and read back to verify"
    assert (code, out.splitlines()[-1]) == (0, last)
    assert (here.labels("a"), here.labels("b")) == ({KEY: "mine", **T4}, {})
    assert here.labels("c") == {"muster.dev/accelerator": "t4", "nvidia.com/gpu.count": "8"}
    assert here.run("unlabel-gpus", "--yes")[0] == 0
    assert here.labels("c") == {}


def test_unlabelling_some_nodes_warns_that_they_are_hidden(here: Cluster) -> None:
    here.put(node("a"), node("b"))
    for name in "ab":
        here.apply(name, {KEY: "t4"})
    errors = here.run("unlabel-gpus", "--yes", "--node", "a")[2]
    assert errors == "muster unlabel-gpus: without the label, SkyPilot does not see a\n"
    assert (here.labels("a"), here.labels("b")) == ({}, {KEY: "t4"})


def test_unlabel_removes_the_labelers_objects_on_request(here: Cluster) -> None:
    here.put(node("a"), clusters.reports({"a": {Product("NVIDIA L4", 23034): 8}}))
    wanted = decision_publisher.condition_of({"device-plugin": Verdict.PLUGIN_DOWN})
    uid = here.node("a")["metadata"]["uid"]
    body = decision_publisher.condition_patch("a", uid, wanted, at=dt.datetime.now(dt.UTC))
    path = f"/api/v1/nodes/a/status?fieldManager={model.FIELD_MANAGER}"
    here.send("PATCH", path, body, "application/apply-patch+yaml")
    words = ("unlabel-gpus", "--objects", "--muster-namespace", "default")
    kinds = [[c["type"] for c in here.node("a")["status"]["conditions"]]]
    for more in ("--dry-run", "--yes"):
        assert here.run(*words, more)[0] == 0
        kinds.append([c["type"] for c in here.node("a")["status"]["conditions"]])
    assert kinds == [
        ["Ready", model.CONDITION],
        ["Ready", model.CONDITION],
        ["Ready"],
    ]
    assert here.send("GET", "/api/v1/namespaces/default/configmaps")["items"] == []


@pytest.mark.parametrize(
    "words", [("--app", "--yes"), ("--apply", "--ye"), ("--rate", "nan"), ("--rate", "0")]
)
def test_what_is_not_written_out_is_not_done(here: Cluster, words: tuple[str, ...]) -> None:
    here.put(node("a", labels=DO))
    assert here.run("label-gpus", *words)[0] == 2
    assert KEY not in here.labels("a")


def test_a_part_of_a_gpu_is_no_whole_card_whatever_reports_it(here: Cluster) -> None:
    whole = {GFD: "NVIDIA-A100-SXM4-80GB", "nvidia.com/gpu.memory": "81920"}
    parts = {"nvidia.com/mig-1g.10gb": "7"}
    virtual = {GFD: "NVIDIA-A40", "nvidia.com/vgpu.present": "true"}
    karpenter = {"karpenter.k8s.aws/instance-gpu-name": "a100"}
    attributes = {"productName": {"string": "NVIDIA A100-SXM4-80GB"}, "type": {"string": "mig"}}
    device = {"name": "d", "attributes": attributes, "capacity": {"memory": {"value": "9728Mi"}}}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "c", "devices": [device]}
    here.put(
        node("a", gpus=None, resources=parts, labels=whole),
        node("b", labels=virtual),
        node("c"),
        node("d", gpus=None, resources=parts, labels=karpenter),
        {"kind": "ResourceSlice", "metadata": {"name": "s"}, "spec": spec},
    )
    code, out, _ = here.run("label-gpus", "--apply", "--yes", "--partial", "--force-ambiguous")
    assert (code, out.splitlines()[-1]) == (1, "4 refused")
    report = orjson.loads(here.run("check", "gpu", "--output", "json")[1])
    assert [f["object"] for f in report["findings"] if f["id"] == "GPU007"] == list("abcd")


def test_a_better_source_that_was_not_read_prevents_writing(here: Cluster) -> None:
    here.put(node("a", labels=DO))
    limited = here.user(("*", "resourceslices"), ("*", "configmaps"))
    code, _, errors = here.run("label-gpus", "--apply", "--yes", kubeconfig=limited)
    assert (code, KEY in here.labels("a"), errors.count("could not be read: ")) == (1, False, 2)
    assert errors.endswith(
        "nothing was written: the best sources about the GPUs could not be read; "
        "pass --unheard to ignore that\n"
    )
    assert here.run("label-gpus", "--apply", "--yes", "--unheard", kubeconfig=limited)[0] == 0
    assert here.labels("a")[KEY] == "h100"


def test_a_nodes_agent_can_have_its_labels_as_a_file_of_features(
    here: Cluster, tmp_path: pathlib.Path
) -> None:
    kinds = {Product("NVIDIA L4", 23034): 8}
    here.put(node("a"), node("b"), clusters.reports({"a": kinds, "b": kinds}))
    file = tmp_path / "muster"
    words = ("label-gpus", "--muster-namespace", "default", "--features", str(file))
    limited = here.user(("patch", "nodes"))
    assert here.run(*words, "--node", "a", kubeconfig=limited) == (0, "", "")
    assert file.read_text() == (
        "muster.dev/accelerator=l4\n"
        "muster.dev/accelerator-count=8\n"
        "muster.dev/accelerator-memory-mib=23034\n"
        "skypilot.co/accelerator=l4\n"
    )
    assert (here.labels("a"), [file_.name for file_ in tmp_path.glob(".muster-*")]) == ({}, [])
    # all or none here, too
    here.put(node("c"))
    code, _, errors = here.run(*words, "--node", "a")
    assert (code, file.read_text()) == (1, "")
    assert "a gets no label: 1 of 3 GPU nodes would remain without" in errors
    for wrong in ((), ("--node", "a", "--apply", "--yes")):
        assert here.run(*words, *wrong)[0] == 2
    nowhere = ("label-gpus", "--features", str(tmp_path / "no" / "dir"), "--node", "a")
    assert here.run(*nowhere)[0] == 2


def test_labelling_keeps_the_other_labels_that_are_ours(here: Cluster) -> None:
    here.put(node("a", labels=DO))
    here.apply("a", {"muster.dev/accelerator-count": "8"})
    assert here.run("label-gpus", "--apply", "--yes")[0] == 0
    assert here.labels("a") == {**DO, KEY: "h100", "muster.dev/accelerator-count": "8"}


def test_a_missing_permission_is_named_before_anything_is_done(here: Cluster) -> None:
    here.put(node("a", labels=DO))
    limited = here.user(("patch", "nodes"))
    code, out, errors = here.run("label-gpus", "--apply", "--yes", kubeconfig=limited)
    assert (code, out, errors) == (4, "", "muster label-gpus: not allowed to patch nodes\n")
    assert here.run("label-gpus", kubeconfig=limited)[0] == 0


def test_a_node_that_is_not_there_is_a_mistake(here: Cluster) -> None:
    here.put(node("a", labels=DO))
    code, _, errors = here.run("label-gpus", "--node", "z")
    assert (code, errors) == (2, "muster label-gpus: no such node: z\n")


@pytest.mark.parametrize("reason", [refusals.Reason.UNAVAILABLE, refusals.Reason.TOO_MANY_REQUESTS])
def test_what_was_not_written_makes_it_end_non_zero(here: Cluster, reason: refusals.Reason) -> None:
    here.put(node("a", labels=DO), node("b", labels=DO))
    here.api.refuse("/api/v1/nodes/b", reason)
    code, out, errors = here.run("label-gpus", "--apply", "--yes")
    last = "labels changed on 1 of 2 nodes, and read back to verify"
    assert (code, out.splitlines()[-1]) == (1, last)
    assert errors.startswith("muster label-gpus: b: label node b: HTTP ")


def test_a_cluster_without_gpus_is_no_error(here: Cluster) -> None:
    here.put(node(gpus=None))
    assert here.run("label-gpus", "--apply", "--yes")[:2] == (0, "the cluster has no GPU nodes\n")


def test_without_labels_of_ours_there_is_nothing_to_remove(here: Cluster) -> None:
    here.put(node())
    nothing = "nothing to remove: no node has labels that muster wrote\n"
    assert here.run("unlabel-gpus", "--dry-run")[:2] == (0, nothing)


@pytest.mark.parametrize(
    ("words", "text", "out", "code"),
    [
        (["NVIDIA L4"], "", "l4\texact\n", 0),
        (["NVIDIA", "L4"], "", "", 2),
        (
            ["--tsv"],
            "Tesla T4\t15360\n\nNVIDIA A100\n",
            "t4\texact\tTesla T4\na100\tmemory-unknown\tNVIDIA A100\n",
            0,
        ),
        (["--tsv"], "Tesla T4\tmany\n", "", 2),
        (["--tsv"], "Tesla T4\t0\n", "", 2),
        (["NVIDIA L4", "--memory-mib", "0"], "", "", 2),
        (["NVIDIA L4", "--memory-mib", "-5"], "", "", 2),
        ([], "", "", 2),
        (["NVIDIA L4", "--tsv"], "", "", 2),
        (["\x1b[31m"], "", "31m\tfallback\n", 0),
    ],
)
def test_gpu_name_says_what_a_product_would_be_called(
    words: list[str], text: str, out: str, code: int
) -> None:
    assert muster_command.muster("gpu-name", *words, stdin=text)[:2] == (code, out)


def test_a_program_reads_what_is_planned_and_what_was_written_as_json(here: Cluster) -> None:
    here.put(node("a", labels=T4), node("b", labels={**L4, KEY: "l4"}))
    planned = {
        "node": "a",
        "gpu": f"{GFD}=Tesla-T4",
        "source": "GPU feature discovery",
        "current": None,
        "new": "t4",
        "step": "write",
        "reason": "exact",
    }
    for words, written in ((), 0), (("--apply", "--yes"), 1):
        code, out, _ = here.run("label-gpus", "--json", *words)
        result = orjson.loads(out)
        assert (code, result["nodes"][0], result["nodes"][1]["step"]) == (0, planned, "keep")
        assert (result["written"], result["failed"]) == (written, {})
    code, out, _ = here.run("unlabel-gpus", "--json", "--yes")
    assert (code, orjson.loads(out)["written"], here.labels("a").get(KEY)) == (0, 1, None)
