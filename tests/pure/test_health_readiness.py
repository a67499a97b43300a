"""Times in the manifests that health relies on."""

from pathlib import Path

import yaml

from muster_health.model import config

_PLUGIN = Path(__file__).resolve().parents[2] / "k8s" / "base" / "plugin.yaml"


def test_a_suspended_process_is_not_ready_before_health_reaches_a_verdict() -> None:
    (daemonset,) = (
        document
        for document in yaml.safe_load_all(_PLUGIN.read_text())
        if document["kind"] == "DaemonSet"
    )
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    probe = container["readinessProbe"]
    seconds = probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]

    assert seconds < config.Detection().ready_s
