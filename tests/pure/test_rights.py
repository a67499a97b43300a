"""What muster's service accounts may do at the Kubernetes API: no more, and no less."""

import pytest

from tests import deployed, rights


@pytest.mark.parametrize("overlay", deployed.OVERLAYS)
def test_every_account_may_do_its_work_and_nothing_else(overlay: str) -> None:
    found = deployed.objects(overlay)
    assert [asked for asked in rights.MAY if not rights.allows(found, asked)] == []
    assert [asked for asked in rights.MAY_NOT if rights.allows(found, asked)] == []


def test_every_right_that_is_given_is_on_the_table() -> None:
    told = {
        (rights.Question("", one.verb, one.what).resource.partition(".")[0], one.verb)
        for one in rights.MAY
    }
    given = {
        (resource, verb)
        for found in deployed.objects("minimal")
        if found["kind"] in {"Role", "ClusterRole"}
        for rule in found["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert given == told


def test_every_account_is_asked_about() -> None:
    there = {
        found["metadata"]["name"]
        for found in deployed.objects("production")
        if found["kind"] == "ServiceAccount"
    }
    assert there == {f"muster-{account}" for account in rights.ACCOUNTS}
