"""Pure: decodes the API server's admission request for a pod, and encodes the answer.

The answer always allows the pod: a pod that cannot be read or changed stays unchanged, with a
warning. Only a body that is not an admission request gets no answer.
"""

import base64
import re
from typing import Final

import msgspec

from muster import codec, escaping
from muster.kubernetes import objects
from muster_fuse.admission import pod as pods
from muster_fuse.admission import pod_patch

_VERSION: Final = "admission.k8s.io/v1"
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_WARNINGS_MAX: Final = 16
_WARNING_MAX: Final = 250
"""The longest warning that the API server does not truncate (admission/v1, AdmissionResponse)."""


class Unanswerable(Exception):
    """The body is not an admission request for an object in a namespace."""


class Unreadable(Exception):
    """The pod cannot be read; the message gives the reason."""


class _Kind(objects.Object, frozen=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class Request(objects.Object, frozen=True):
    """The API server's request to review an object."""

    uid: str
    kind: _Kind = _Kind()
    sub_resource: str = ""
    namespace: str = ""
    operation: str = ""
    dry_run: bool | None = None
    object: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_new_pod(self) -> bool:
        """Return whether the request creates a pod; the webhook changes nothing else."""
        return (self.kind, self.sub_resource, self.operation) == (
            _Kind(group="", version="v1", kind="Pod"),
            "",
            "CREATE",
        )


class _Review(objects.Object, frozen=True):
    request: Request
    api_version: str = ""


class _HasMetadata(objects.Object, frozen=True):
    metadata: pods.Metadata


def request_in(body: bytes) -> Request:
    """Return the admission request in a body. Raises Unanswerable."""
    try:
        review = msgspec.json.decode(body, type=_Review)
    except codec.UNREADABLE as error:
        raise Unanswerable(f"not an AdmissionReview: {error}") from None
    if review.api_version != _VERSION or not review.request.uid:
        raise Unanswerable(f"not an AdmissionReview of {_VERSION} with a uid")
    if not _NAMESPACE.fullmatch(review.request.namespace):
        # the namespace becomes part of a URL path, and anyone may send a request
        raise Unanswerable("the namespace is missing or malformed")
    return review.request


def pod_in(request: Request) -> pods.Pod:
    """Return the pod that the request creates. Raises Unreadable."""
    try:
        return msgspec.json.decode(request.object, type=pods.Pod)
    except codec.UNREADABLE as error:
        raise Unreadable(f"the pod cannot be read: {error}") from None


def metadata_in(request: Request) -> pods.Metadata:
    """Return the metadata of a pod that `pod_in` has already decoded."""
    return msgspec.json.decode(request.object, type=_HasMetadata).metadata


def answer(uid: str, plan: pod_patch.Plan) -> bytes:
    """Return the answer: the pod is allowed, with the plan's change and warnings."""
    response: dict[str, object] = {"uid": uid, "allowed": True}
    if plan.warnings:
        texts = (
            escaping.plain(f"fuse.muster.dev: {text}") for text in plan.warnings[:_WARNINGS_MAX]
        )
        response["warnings"] = [text[:_WARNING_MAX] for text in texts]
    if plan.patch:
        patch = base64.b64encode(msgspec.json.encode(plan.patch)).decode()
        response |= {"patchType": "JSONPatch", "patch": patch}
    review = {"apiVersion": _VERSION, "kind": "AdmissionReview", "response": response}
    return msgspec.json.encode(review)
