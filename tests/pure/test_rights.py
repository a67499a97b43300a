"""What muster's service accounts may do at the Kubernetes API: no more, and no less."""

import pytest

from tests.worlds import api_rights, manifests


@pytest.mark.parametrize("overlay", manifests.OVERLAYS)
def test_every_account_may_do_its_work_and_nothing_else(overlay: str) -> None:
    found = manifests.objects(overlay)
    assert [asked for asked in api_rights.MAY if not api_rights.allows(found, asked)] == []
    assert [asked for asked in api_rights.MAY_NOT if api_rights.allows(found, asked)] == []


def test_every_right_that_is_given_is_on_the_table() -> None:
    told = {
        (api_rights.Question("", one.verb, one.what).resource.partition(".")[0], one.verb)
        for one in api_rights.MAY
    }
    given = {
        (resource, verb)
        for found in manifests.objects("minimal")
        if found["kind"] in {"Role", "ClusterRole"}
        for rule in found["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert given == told


def test_every_account_is_asked_about() -> None:
    there = {
        found["metadata"]["name"]
        for found in manifests.objects("production")
        if found["kind"] == "ServiceAccount"
    }
    assert there == {f"muster-{account}" for account in api_rights.ACCOUNTS}
