"""Pure: permissions of users of the API stand-in: everything except what was denied.

A user is a bearer token; no token is the administrator. The texts are those of the real API server
(apiserver `pkg/endpoints/handlers/responsewriters/errors.go`, `pkg/authorization`).
"""

from collections.abc import Mapping

from muster.local.kubernetes import refusals, resources, trees

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

_VERBS: Mapping[str, str] = {"POST": "create", "PUT": "update", "PATCH": "patch"}


class Users:
    """The valid tokens, and each one's denied rights: verb and plural, `*` for any."""

    def __init__(self) -> None:
        self._denied: dict[str, set[tuple[str, str]]] = {}

    def add(self, token: str) -> None:
        """Add a user."""
        self._denied.setdefault(token, set())

    def deny(self, token: str, verb: str, plural: str) -> None:
        """Deny a right."""
        self._denied.setdefault(token, set()).add((verb, plural))

    def grant(self, token: str, verb: str, plural: str) -> None:
        """Grant what was denied with the same arguments."""
        self._denied[token].discard((verb, plural))

    def refuse_unknown(self, token: str) -> None:
        """Raise 401 for an unknown token."""
        if token and token not in self._denied:
            raise refusals.RequestError(refusals.Reason.UNAUTHORIZED, "Unauthorized")

    def refuse_forbidden(self, token: str, verb: str, place: resources.Place) -> None:
        """Raise 403 for a denied right."""
        if self._may(token, verb, place.resource.plural):
            return
        where = f' in the namespace "{place.namespace}"' if place.namespace else ""
        raise place.refusal(
            refusals.Reason.FORBIDDEN,
            f'is forbidden: User "{token}" cannot {verb} resource "{place.resource.plural}" in '
            f'API group "{place.resource.group}"{where or " at the cluster scope"}',
        )

    def review(self, token: str, body: trees.Json) -> trees.Tree:
        """Answer a SelfSubjectAccessReview."""
        review = body if isinstance(body, dict) else {}
        verb = trees.string_at(review, "spec", "resourceAttributes", "verb")
        plural = trees.string_at(review, "spec", "resourceAttributes", "resource")
        return {**review, "status": {"allowed": self._may(token, verb, plural)}}

    def _may(self, token: str, verb: str, plural: str) -> bool:
        denied = self._denied.get(token, set())
        return not denied & {(verb, plural), ("*", plural), (verb, "*")}


def verb(method: str, place: resources.Place, *, is_watch: bool) -> str:
    """Return the RBAC verb of a request."""
    if method == "GET":
        return "get" if place.name else "watch" if is_watch else "list"
    if method == "DELETE":
        return "delete" if place.name else "deletecollection"
    return _VERBS.get(method, method.lower())


def kubeconfig(url: str, token: str) -> dict[str, object]:
    """Return a kubeconfig that leads to the stand-in, as the user of a token."""
    context = {"cluster": "muster", "user": "muster"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "muster",
        "clusters": [{"name": "muster", "cluster": {"server": url}}],
        "users": [{"name": "muster", "user": {"token": token} if token else {}}],
        "contexts": [{"name": "muster", "context": context}],
    }
