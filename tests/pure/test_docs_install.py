"""docs/install.md names the ports, files, settings and images that exist."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml

from muster.nats import streams
from tests.worlds import manifests

PAGE: Final = (manifests.ROOT / "docs/install.md").read_text("utf-8")
VALUES_MAX: Final = 15
"""The most lines of values that a first installation of the chart may need."""
COMPOSE: Final = yaml.safe_load((manifests.ROOT / "compose.yaml").read_text("utf-8"))


def test_the_page_has_every_port_of_compose_and_no_other() -> None:
    listed = set(re.findall(r"^\| (\d{4}) \|", PAGE, re.MULTILINE))
    there = {
        port.split(":")[1]
        for service in COMPOSE["services"].values()
        for port in service.get("ports", [])
    }
    assert listed == there


def test_the_page_counts_the_containers() -> None:
    running = [name for name, service in COMPOSE["services"].items() if "profiles" not in service]
    words = {12: "Twelve", 13: "Thirteen", 14: "Fourteen"}
    assert f"\n{words[len(running)]} containers" in PAGE


def test_the_page_has_every_overlay() -> None:
    listed = set(re.findall(r"^\| `([a-z]+)` \| ", PAGE, re.MULTILINE))
    assert listed >= set(manifests.OVERLAYS)
    assert {folder.name for folder in (manifests.ROOT / "k8s/overlays").iterdir()} == set(
        manifests.OVERLAYS
    )


def test_a_folder_made_as_the_page_says_renders_with_the_image_it_names(tmp_path: Path) -> None:
    (written,) = re.findall(r"cat > my-muster/kustomization.yaml <<EOF\n(.*?)EOF", PAGE, re.DOTALL)
    (component,) = re.findall(r"`(components: [^`]+)`", PAGE)
    (tmp_path / "muster").symlink_to(manifests.ROOT)
    folder = tmp_path / "my-muster"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(f"{written}{component}\n")
    objects = [item for item in yaml.safe_load_all(manifests.render(folder)) if item]
    images = {
        container["image"]
        for item in objects
        if "template" in item.get("spec", {})
        for container in item["spec"]["template"]["spec"]["containers"]
    }
    nats = {image for image in images if image.startswith("docker.io/library/nats:")}
    assert images - nats == {"registry.example.com/muster:0.1.0"}
    assert "PrometheusRule" in {item["kind"] for item in objects}


def test_the_receiver_that_the_page_adds_with_kustomize_reads_its_secret(tmp_path: Path) -> None:
    (made,) = re.findall(r"cat > my-muster/kustomization.yaml <<EOF\n(.*?)EOF", PAGE, re.DOTALL)
    (added,) = re.findall(r"cat >> my-muster/kustomization.yaml <<EOF\n(.*?)EOF", PAGE, re.DOTALL)
    (settings,) = re.findall(r"cat > my-muster/notifier.yaml <<EOF\n(.*?)EOF", PAGE, re.DOTALL)
    (tmp_path / "muster").symlink_to(manifests.ROOT)
    folder = tmp_path / "my-muster"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(made + added)
    (folder / "notifier.yaml").write_text(settings)
    objects = [item for item in yaml.safe_load_all(manifests.render(folder)) if item]
    (pod,) = (
        item["spec"]["template"]["spec"]
        for item in objects
        if (item["kind"], item["metadata"]["name"]) == ("Deployment", "muster-notifier")
    )
    (variable,) = (env for env in pod["containers"][0]["env"] if env["name"] == "SLACK_URL")
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "slack", "key": "url"}}
    assert PAGE.count("create secret generic slack --from-literal=url=https://") == 1
    (read,) = (item["data"] for item in objects if item["metadata"]["name"] in _config_maps(pod))
    assert read == {"notifier.yaml": settings}


def _config_maps(pod: dict[str, Any]) -> set[str]:
    return {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}


def test_the_values_of_the_page_are_short_and_refer_to_the_secret_that_it_makes() -> None:
    (written,) = re.findall(r"^```yaml\n(image:.*?)```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(written.splitlines()) <= VALUES_MAX
    values = yaml.safe_load(written)
    schema = json.loads((manifests.ROOT / "k8s/chart/muster/values.schema.json").read_text("utf-8"))
    jsonschema.validate(values, schema)
    (receiver,) = values["receivers"]
    assert receiver["slack"]["webhook_from"] == {"secretRef": {"name": "slack", "key": "url"}}
    defaults = yaml.safe_load((manifests.ROOT / "k8s/chart/muster/values.yaml").read_text("utf-8"))
    assert values["devices"] == defaults["settings"]["plugin"]["resources"]
    assert values["image"]["tag"] == defaults["image"]["tag"]


def test_the_patch_of_the_page_gives_the_nodes_their_image(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(patches:\n[^`]+)", PAGE, re.MULTILINE)
    (patch,) = (block for block in blocks if "muster-node" in block)
    (tmp_path / "muster").symlink_to(manifests.ROOT)
    folder = tmp_path / "my-muster"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(
        f"resources: [../muster/k8s/overlays/minimal]\n{patch}"
    )
    images = {
        (item["kind"], container["image"])
        for item in yaml.safe_load_all(manifests.render(folder))
        if item and "template" in item.get("spec", {})
        for container in item["spec"]["template"]["spec"]["containers"]
    }
    of_nodes = {image for kind, image in images if kind == "DaemonSet"}
    assert of_nodes == {"registry.example.com/muster-node:0.1.0"}
    assert ("Deployment", "muster:0.1.0") in images


def test_the_secrets_that_the_page_makes_are_all_that_are_read(tmp_path: Path) -> None:
    (loop,) = re.findall(r"^for user in .*?^done$", PAGE, re.DOTALL | re.MULTILINE)
    (kubectl, made) = (tmp_path / "kubectl", tmp_path / "made.yaml")
    real = shutil.which("kubectl", path=str(Path(sys.executable).parent))
    assert real, "kubectl belongs to the environment (pyproject.toml, dev)"
    kubectl.write_text(
        f'#!/bin/sh\n{real} "$@" --dry-run=client -o yaml >> {made}\necho --- >> {made}\n'
    )
    kubectl.chmod(0o700)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["/bin/sh", "-e"], input=loop, text=True, env={"PATH": path}, check=True)
    secrets = [item for item in yaml.safe_load_all(made.read_text()) if item]
    passwords = [base64.b64decode(item["data"]["password"]).decode() for item in secrets]
    assert all(re.fullmatch(r"p[0-9a-f]{48}", item) for item in passwords)
    assert len(set(passwords)) == len(passwords)
    read = {
        (ref["name"], ref["key"])
        for pod in manifests.pods("minimal").values()
        for container in pod["containers"]
        for env in container.get("env", [])
        if (ref := env.get("valueFrom", {}).get("secretKeyRef"))
    }
    assert {(item["metadata"]["name"], key) for item in secrets for key in item["data"]} == read
    shown = re.findall(r"get secret (\S+) -o jsonpath='\{\.data\.(\w+)\}'", PAGE)
    assert shown == [("muster-nats-reader", "password")]


def test_streams_fit_where_they_are_kept() -> None:
    claim = manifests.only("minimal", "StatefulSet", "muster-nats")["spec"]["volumeClaimTemplates"]
    disk = int(claim[0]["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 2**30
    conf = manifests.file_in("minimal", "muster-nats", "nats.conf")
    (store,) = re.findall(r"max_file_store: (\d+)GB", conf)
    kept = sum(asset.bytes_max for asset in (*streams.STREAMS, *streams.BUCKETS))
    assert kept < int(store) * 2**30 < disk
