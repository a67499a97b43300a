"""The rights of muster's accounts at the Kubernetes API, and an evaluation of RBAC for them."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Final

from tests.worlds import manifests

ACCOUNTS: Final = ("plugin", "nats", "gate", "health", "labeler", "notifier")

_OF_ACCOUNTS: Final = "system:serviceaccounts"
_GROUPS: Final = (_OF_ACCOUNTS, f"{_OF_ACCOUNTS}:muster", "system:authenticated")


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """The question whether an account has a right.

    `what` is `resource`, `resource/name` or `resource:subresource`.
    """

    account: str
    verb: str
    what: str
    namespace: str = ""

    @property
    def resource(self) -> str:
        """The resource, with its subresource, as in a Role."""
        return self.what.partition("/")[0].replace(":", "/")

    @property
    def name(self) -> str:
        """The name of the object; empty for any."""
        return self.what.partition("/")[2]

    def review(self) -> dict[str, Any]:
        """Return the SubjectAccessReview for this question."""
        where, _, sub = self.what.partition("/")[0].partition(":")
        resource, _, group = where.partition(".")
        attributes = {"verb": self.verb, "group": group, "resource": resource, "subresource": sub}
        attributes |= {"name": self.name, "namespace": self.namespace}
        user = {"user": f"system:serviceaccount:muster:muster-{self.account}", "groups": _GROUPS}
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {**user, "resourceAttributes": attributes},
        }


def _may() -> Iterator[Question]:
    for verb in ("get", "list", "watch"):
        yield Question("health", verb, "nodes")
        yield Question("labeler", verb, "nodes")
        yield Question("health", verb, "pods", "muster")
        yield Question("health", verb, "daemonsets.apps", "muster")
    yield Question("health", "get", "leases.coordination.k8s.io", "kube-node-lease")
    yield Question("health", "create", "events", "muster")
    yield Question("health", "list", "pods")
    yield Question("labeler", "patch", "nodes")
    yield Question("labeler", "patch", "nodes:status")
    yield Question("labeler", "create", "events", "default")
    for verb in ("get", "update"):
        yield Question("labeler", verb, "leases.coordination.k8s.io/muster-labeler", "muster")
    for verb in ("get", "patch"):
        yield Question("labeler", verb, "configmaps/muster-inventory", "muster")
    yield Question("labeler", "create", "leases.coordination.k8s.io", "muster")
    yield Question("labeler", "create", "configmaps", "muster")


MAY: Final = tuple(_may())
"""The rights that muster's accounts have."""


MAY_WATCH: Final = (
    Question("health", "list", "daemonsets.apps"),
    Question("health", "list", "events"),
    Question("health", "list", "resourceslices.resource.k8s.io"),
    Question("health", "list", "resourceclaims.resource.k8s.io"),
    Question("health", "list", "deviceclasses.resource.k8s.io"),
)
"""The rights that the overlay `watch` adds."""


def _may_not() -> Iterator[Question]:
    for account in ACCOUNTS:
        for verb in ("get", "list", "create", "patch"):
            yield Question(account, verb, "secrets", "muster")
        for verb in ("create", "update", "delete"):
            yield Question(account, verb, "nodes")
        yield Question(account, "create", "pods", "muster")
        yield Question(account, "create", "pods:exec", "muster")
        yield Question(account, "delete", "pods", "muster")
        yield Question(account, "create", "serviceaccounts:token", "muster")
        yield Question(account, "patch", "daemonsets.apps", "muster")
        yield Question(account, "impersonate", "users")
        yield Question(account, "get", "pods", "default")
        yield Question(account, "watch", "pods", "default")
        yield Question(account, "list", "configmaps", "muster")
        yield Question(account, "patch", "validatingadmissionpolicies.admissionregistration.k8s.io")
        yield Question(account, "patch", "clusterroles.rbac.authorization.k8s.io")
    for account in ("plugin", "nats", "gate", "labeler", "notifier"):
        yield Question(account, "list", "pods", "default")
    for account in ("plugin", "nats", "gate", "notifier"):
        yield Question(account, "get", "nodes")
        yield Question(account, "get", "pods", "muster")
        yield Question(account, "create", "events", "default")
    yield Question("health", "patch", "nodes")
    yield Question("health", "patch", "nodes:status")
    yield Question("health", "get", "leases.coordination.k8s.io", "kube-system")
    yield Question("labeler", "get", "leases.coordination.k8s.io/muster-other", "muster")
    yield Question("labeler", "patch", "configmaps/muster-other", "muster")
    yield Question("labeler", "get", "pods", "muster")


MAY_NOT: Final = tuple(_may_not())
"""The rights that muster's accounts must not have."""


def allows(objects: Iterable[manifests.Object], asked: Question) -> bool:
    """Return whether the roles and bindings among these objects grant a right.

    It follows k8s.io/component-helpers/auth/rbac/validation, but knows no groups of subjects.
    """
    manifests = list(objects)
    subject = {
        "kind": "ServiceAccount",
        "name": f"muster-{asked.account}",
        "namespace": "muster",
    }
    for binding in manifests:
        is_role = binding["kind"] == "RoleBinding"
        if not is_role and binding["kind"] != "ClusterRoleBinding":
            continue
        place = binding["metadata"].get("namespace", "")
        assert {each["kind"] for each in binding["subjects"]} == {"ServiceAccount"}
        if subject in binding["subjects"] and (not is_role or place == asked.namespace):
            reference = binding["roleRef"]
            rules = [
                rule
                for role in manifests
                if (role["kind"], role["metadata"]["name"])
                == (reference["kind"], reference["name"])
                and (role["kind"] == "ClusterRole" or role["metadata"]["namespace"] == place)
                for rule in role["rules"]
            ]
            if any(_covers(rule, asked) for rule in rules):
                return True
    return False


def _covers(rule: dict[str, Any], asked: Question) -> bool:
    resource, _, group = asked.resource.partition(".")
    if "/" in group:
        group, _, sub = group.partition("/")
        resource = f"{resource}/{sub}"
    names = rule.get("resourceNames", [])
    return (
        _has(rule["verbs"], asked.verb)
        and _has(rule["apiGroups"], group)
        and _has(rule["resources"], resource)
        and (not names or asked.name in names)
    )


def _has(words: list[str], word: str) -> bool:
    return word in words or "*" in words
