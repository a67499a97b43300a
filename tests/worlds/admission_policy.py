"""The ValidatingAdmissionPolicies of k8s/base, evaluated with the C++ runtime of CEL."""

import functools
import pathlib
from typing import Any, Final

import yaml
from cel_expr_python import cel

from muster_labeler import model

FILE: Final = pathlib.Path(__file__).resolve().parents[2] / "k8s/base/admission.yaml"
LABELER: Final = "system:serviceaccount:muster:muster-labeler"
_NAMES: Final = ("namespaceObject", "object", "oldObject", "request", "variables")
_CEL: Final = cel.NewEnv(variables=dict.fromkeys(_NAMES, cel.Type.DYN))


def denied(
    old: dict[str, Any] | None,
    new: dict[str, Any] | None,
    *,
    operation: str = "UPDATE",
    subresource: str = "",
    user: str = LABELER,
    manager: str | None = model.FIELD_MANAGER,
) -> list[str]:
    """Return the messages with which the policy for nodes denies a change; empty if it does not.

    `old` is None when a node is created, `new` when it is deleted.
    """
    policy = next(yaml.safe_load_all(FILE.read_text()))["spec"]
    options = {} if manager is None else {"fieldManager": manager}
    request = {"operation": operation, "userInfo": {"username": user}, "options": options}
    # the API server omits it when it is empty
    request |= {"subResource": subresource} if subresource else {}
    known: dict[str, Any] = {"request": request, "object": new, "oldObject": old}
    if not all(_value(rule["expression"], known) for rule in policy["matchConditions"]):
        return []
    # the API server evaluates variables lazily: a create or delete is refused without them
    variables = policy["variables"] if old is not None and new is not None else []
    return refused(policy["validations"], known, variables=variables)


def denied_object(
    new: dict[str, Any],
    *,
    old: dict[str, Any] | None = None,
    user: str = LABELER,
    policy: dict[str, Any] | None = None,
) -> list[str]:
    """Return the messages with which the policy for objects other than nodes denies a change.

    `old` is None when the object is created. `policy` defaults to the one of k8s/base.
    """
    if policy is None:
        policy = next(
            document
            for document in yaml.safe_load_all(FILE.read_text())
            if document["metadata"]["name"] == "muster-labeler-objects"
        )
    operation = "CREATE" if old is None else "UPDATE"
    kind = {"kind": new["kind"]}
    request = {"operation": operation, "userInfo": {"username": user}, "kind": kind}
    known: dict[str, Any] = {"request": request, "object": new, "oldObject": old}
    spec = policy["spec"]
    if not all(_value(rule["expression"], known) for rule in spec["matchConditions"]):
        return []
    return refused(spec["validations"], known, variables=spec["variables"])


def refused(
    rules: list[dict[str, str]], known: dict[str, Any], *, variables: list[dict[str, str]]
) -> list[str]:
    """Return the messages of the rules that are false for these values."""
    known["variables"] = {}
    for variable in variables:
        known["variables"][variable["name"]] = _value(variable["expression"], known)
    return [rule["message"] for rule in rules if not _value(rule["expression"], known)]


def _value(expression: str, known: dict[str, Any]) -> Any:
    value = _compiled(expression).eval(data=known)
    # with failurePolicy Fail, an error denies the request
    assert value.type() != cel.Type.ERROR, f"{expression}: {value.value()}"
    return value.plain_value()


@functools.cache
def _compiled(expression: str) -> Any:
    return _CEL.compile(expression)
