"""Pure: errors of the Kubernetes API: an exception that clients receive as a `Status`.

Reasons and codes are those of apimachinery `pkg/apis/meta/v1/types.go` and `pkg/api/errors`.
"""

import dataclasses
import enum
from typing import Self


class Reason(enum.StrEnum):
    """The word in `Status.reason`, which clients check, and its HTTP status."""

    code: int

    def __new__(cls, word: str, code: int) -> Self:
        """Create a reason with its HTTP status."""
        reason = str.__new__(cls, word)
        reason._value_ = word
        reason.code = code
        return reason

    BAD_REQUEST = "BadRequest", 400
    UNAUTHORIZED = "Unauthorized", 401
    FORBIDDEN = "Forbidden", 403
    NOT_FOUND = "NotFound", 404
    METHOD_NOT_ALLOWED = "MethodNotAllowed", 405
    ALREADY_EXISTS = "AlreadyExists", 409
    CONFLICT = "Conflict", 409
    EXPIRED = "Expired", 410
    TOO_LARGE = "RequestEntityTooLarge", 413
    UNSUPPORTED_MEDIA_TYPE = "UnsupportedMediaType", 415
    INVALID = "Invalid", 422
    TOO_MANY_REQUESTS = "TooManyRequests", 429
    UNAVAILABLE = "ServiceUnavailable", 503


@dataclasses.dataclass(frozen=True)
class Cause:
    """One field that causes the refusal."""

    field: str
    message: str
    reason: str = "FieldValueInvalid"


class RequestError(Exception):
    """A request that is refused; `status()` is the answer."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        kind: str = "",
        name: str = "",
        causes: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.code = reason.code
        self.message = message
        self.kind = kind
        self.name = name
        self.causes = causes

    def status(self) -> dict[str, object]:
        """Return the `Status` object to answer with."""
        details: dict[str, object] = {}
        if self.name:
            details["name"] = self.name
        if self.kind:
            details["kind"] = self.kind
        if self.causes:
            details["causes"] = [dataclasses.asdict(cause) for cause in self.causes]
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason.value,
            "details": details,
            "code": self.code,
        }


def bad_request(message: str) -> RequestError:
    """Return the error for a malformed request."""
    return RequestError(Reason.BAD_REQUEST, message)


def invalid(kind: str, name: str, *causes: Cause) -> RequestError:
    """Return the error for an object with invalid fields."""
    problems = ", ".join(f"{cause.field}: {cause.message}" for cause in causes)
    message = f'{kind} "{name}" is invalid: {problems}'
    return RequestError(Reason.INVALID, message, kind=kind, name=name, causes=causes)


def no_such_path() -> RequestError:
    """Return the API server's error for an unknown path."""
    return RequestError(Reason.NOT_FOUND, "the server could not find the requested resource")
