"""Statements about a Kubernetes API: rights, tokens, and what it reports about itself."""

from typing import Any, Final

from muster.kubernetes import api as kubernetes_api
from tests.worlds.api_statements import DEFAULT, NODES, Api, Object, sent, statement, until

REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


async def may(who: kubernetes_api.Api, verb: str, resource: str) -> bool:
    """Return whether a user has a right, according to a review of their own access."""
    spec = {"resourceAttributes": {"verb": verb, "resource": resource}}
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    status, answer = await sent(who, "POST", REVIEWS, {**kind, "spec": spec})
    assert status == 201
    allowed: bool = answer["status"]["allowed"]
    return allowed


async def refused(who: kubernetes_api.Api, verb: str, path: str, *body: Any) -> Object:
    """Send a request that the user may not make; return the answer, which must be a 403."""
    status, answer = await sent(who, verb, path, *body)
    assert (status, answer["reason"], answer["code"]) == (403, "Forbidden", 403)
    return answer


@statement
async def test_a_review_says_what_one_may_do(api: Api) -> None:
    viewer = await api.viewer()

    async def holds() -> bool:
        return (await sent(viewer, "GET", f"{DEFAULT}/configmaps"))[0] == 200

    await until("the right to list ConfigMaps", holds)
    assert await may(viewer, "list", "nodes") is False
    assert await may(viewer, "patch", "nodes") is False


@statement
async def test_an_administrator_may_do_everything(api: Api) -> None:
    spec = {"resourceAttributes": {"verb": "patch", "resource": "nodes", "subresource": "status"}}
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    answer = await api.good("POST", REVIEWS, {**kind, "spec": spec})
    assert answer["status"]["allowed"] is True


@statement
async def test_a_refusal_names_the_user_and_the_right(api: Api) -> None:
    viewer = await api.viewer()
    listed = (await refused(viewer, "GET", NODES))["message"]
    assert listed.startswith('nodes is forbidden: User "')
    right = '" cannot list resource "nodes" in API group "" at the cluster scope'
    assert right in listed
    patch = {"metadata": {"labels": {"a": "b"}}}
    words = ("PATCH", f"{NODES}/{api.name}", patch, kubernetes_api.MERGE)
    patched = (await refused(viewer, *words))["message"]
    assert patched.startswith(f'nodes "{api.name}" is forbidden: User "')
    assert '" cannot patch resource "nodes" in API group "" at the cluster scope' in patched


@statement
async def test_what_is_forbidden_is_not_looked_for(api: Api) -> None:
    # 403 and not 404, which would reveal what exists
    await refused(await api.viewer(), "GET", f"{NODES}/{api.name}")


@statement
async def test_a_refusal_in_a_namespace_names_it(api: Api) -> None:
    viewer = await api.viewer()
    message = (await refused(viewer, "GET", f"{DEFAULT}/pods"))["message"]
    assert 'cannot list resource "pods" in API group "" in the namespace "default"' in message


@statement
async def test_an_unknown_token_is_401(api: Api) -> None:
    status, answer = await sent(await api.of("unknown"), "GET", NODES)
    assert (status, answer["reason"], answer["message"]) == (401, "Unauthorized", "Unauthorized")


@statement
async def test_a_token_is_issued_and_says_whose_it_is(api: Api) -> None:
    issued = await api.token(audiences=["nats"], expirationSeconds=600)
    kind = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview"}
    spec = {"token": issued["token"], "audiences": ["nats"]}
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    answer = (await api.good("POST", path, {**kind, "spec": spec}))["status"]
    user = f"system:serviceaccount:default:{api.name}"
    said = (answer["authenticated"], answer["user"]["username"], answer["audiences"])
    assert said == (True, user, ["nats"])
    spec["audiences"] = ["other"]
    refused = (await api.good("POST", path, {**kind, "spec": spec}))["status"]
    assert refused.get("authenticated", False) is False


@statement
async def test_it_says_its_version_and_that_it_is_ready(api: Api) -> None:
    version = await api.good("GET", "/version")
    assert version["gitVersion"].startswith(f"v{version['major']}.{version['minor']}.")
    assert await api.ask("GET", "/readyz") == (200, {"message": "ok"})


@statement
async def test_a_resource_says_what_can_be_done_with_it(api: Api) -> None:
    listed = (await api.good("GET", "/api/v1"))["resources"]
    verbs = {entry["name"]: set(entry["verbs"]) for entry in listed}
    assert verbs["nodes"] >= {"get", "list", "watch", "patch", "create", "delete", "update"}
    assert verbs["nodes/status"] == {"get", "patch", "update"}
