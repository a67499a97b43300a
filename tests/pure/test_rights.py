"""What muster's service accounts may do at the Kubernetes API: no more, and no less."""

import pytest

from tests.worlds import api_rights, manifests


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_every_service_account_has_the_rights_for_its_work_and_no_others(overlay: str) -> None:
    installed = manifests.objects(overlay)
    assert [right for right in api_rights.MAY if not api_rights.allows(installed, right)] == []
    assert [right for right in api_rights.MAY_NOT if api_rights.allows(installed, right)] == []


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_health_reads_more_where_plugins_are_watched_and_nowhere_else(overlay: str) -> None:
    installed = manifests.objects(overlay)
    granted = [right for right in api_rights.MAY_WATCH if api_rights.allows(installed, right)]
    assert granted == ([*api_rights.MAY_WATCH] if overlay == "watch" else [])


@pytest.mark.parametrize("overlay", ["minimal", "watch"])
def test_every_granted_right_is_in_the_table(overlay: str) -> None:
    more = api_rights.MAY_WATCH if overlay == "watch" else ()
    documented = {
        (api_rights.Question("", right.verb, right.what).resource.partition(".")[0], right.verb)
        for right in (*api_rights.MAY, *more)
    }
    granted = {
        (resource, verb)
        for installed in manifests.objects(overlay)
        if installed["kind"] in {"Role", "ClusterRole"}
        for rule in installed["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert granted == documented


def test_every_service_account_is_checked() -> None:
    there = {
        installed["metadata"]["name"]
        for installed in manifests.objects("production")
        if installed["kind"] == "ServiceAccount"
    }
    assert there == {f"muster-{account}" for account in api_rights.ACCOUNTS}
