import pytest

from muster.local.kubernetes import refusals, requests, resources

NODE = resources.place(["api", "v1", "nodes", "a"])
PODS = resources.place(["api", "v1", "namespaces", "n", "pods"])


@pytest.mark.parametrize(
    ("method", "place", "is_watch", "verb"),
    [
        ("GET", NODE, False, "get"),
        ("GET", PODS, False, "list"),
        ("GET", PODS, True, "watch"),
        ("POST", PODS, False, "create"),
        ("PUT", NODE, False, "update"),
        ("PATCH", NODE, False, "patch"),
        ("DELETE", NODE, False, "delete"),
        ("DELETE", PODS, False, "deletecollection"),
    ],
)
def test_a_request_has_the_verb_that_rbac_gives_it(
    method: str, place: resources.Place, verb: str, *, is_watch: bool
) -> None:
    assert requests.verb(method, place, is_watch=is_watch) == verb


def test_a_denied_right_is_refused_by_name_and_a_review_shows_it_before() -> None:
    users = requests.Users()
    users.deny("dev", "patch", "nodes")
    users.deny("dev", "*", "pods")
    users.refuse_forbidden("", "patch", NODE)
    users.refuse_forbidden("dev", "get", NODE)
    with pytest.raises(refusals.RequestError, match='User "dev" cannot patch resource "nodes"'):
        users.refuse_forbidden("dev", "patch", NODE)
    with pytest.raises(refusals.RequestError, match=r'cannot list .* in the namespace "n"'):
        users.refuse_forbidden("dev", "list", PODS)
    body = {"spec": {"resourceAttributes": {"verb": "patch", "resource": "nodes"}}}
    assert users.review("dev", body)["status"] == {"allowed": False}  # type: ignore[arg-type]
    assert users.review("", body)["status"] == {"allowed": True}  # type: ignore[arg-type]


def test_an_unknown_token_is_unauthorized() -> None:
    users = requests.Users()
    users.add("dev")
    users.refuse_unknown("")
    users.refuse_unknown("dev")
    with pytest.raises(refusals.RequestError, match="Unauthorized"):
        users.refuse_unknown("eve")
