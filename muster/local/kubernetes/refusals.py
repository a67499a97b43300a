"""Pure: refusals of the Kubernetes API: an exception that clients receive as a `Status`.

Reasons and codes are those of apimachinery `pkg/apis/meta/v1/types.go` and `pkg/api/errors`.
"""

import dataclasses
import enum
from typing import assert_never


class Reason(enum.StrEnum):
    """The machine-readable word in `Status.reason`; clients branch on it."""

    BAD_REQUEST = "BadRequest"
    UNAUTHORIZED = "Unauthorized"
    FORBIDDEN = "Forbidden"
    NOT_FOUND = "NotFound"
    METHOD_NOT_ALLOWED = "MethodNotAllowed"
    NOT_ACCEPTABLE = "NotAcceptable"
    ALREADY_EXISTS = "AlreadyExists"
    CONFLICT = "Conflict"
    EXPIRED = "Expired"
    TOO_LARGE = "RequestEntityTooLarge"
    UNSUPPORTED_MEDIA_TYPE = "UnsupportedMediaType"
    INVALID = "Invalid"
    TOO_MANY_REQUESTS = "TooManyRequests"
    UNAVAILABLE = "ServiceUnavailable"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cause:
    """One invalid field."""

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
        self.message = message
        self.kind = kind
        self.name = name
        self.causes = causes

    @property
    def code(self) -> int:
        """Return the HTTP status that goes with the reason."""
        return code(self.reason)

    def status(self) -> dict[str, object]:
        """Return the `Status` object to answer with."""
        details: dict[str, object] = {}
        if self.name:
            details["name"] = self.name
        if self.kind:
            details["kind"] = self.kind
        if self.causes:
            details["causes"] = [
                {"reason": cause.reason, "message": cause.message, "field": cause.field}
                for cause in self.causes
            ]
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


def code(reason: Reason) -> int:  # noqa: C901, PLR0911, PLR0912 - one line a reason is the point
    """Return the HTTP status of a reason."""
    match reason:
        case Reason.BAD_REQUEST:
            return 400
        case Reason.UNAUTHORIZED:
            return 401
        case Reason.FORBIDDEN:
            return 403
        case Reason.NOT_FOUND:
            return 404
        case Reason.METHOD_NOT_ALLOWED:
            return 405
        case Reason.NOT_ACCEPTABLE:
            return 406
        case Reason.ALREADY_EXISTS | Reason.CONFLICT:
            return 409
        case Reason.EXPIRED:
            return 410
        case Reason.TOO_LARGE:
            return 413
        case Reason.UNSUPPORTED_MEDIA_TYPE:
            return 415
        case Reason.INVALID:
            return 422
        case Reason.TOO_MANY_REQUESTS:
            return 429
        case Reason.UNAVAILABLE:
            return 503
        case _:
            assert_never(reason)


def bad_request(message: str) -> RequestError:
    """Return the refusal of a request that makes no sense."""
    return RequestError(Reason.BAD_REQUEST, message)


def invalid(kind: str, name: str, *causes: Cause) -> RequestError:
    """Return the refusal of an object whose fields break a rule."""
    problems = ", ".join(f"{cause.field}: {cause.message}" for cause in causes)
    message = f'{kind} "{name}" is invalid: {problems}'
    return RequestError(Reason.INVALID, message, kind=kind, name=name, causes=causes)


def no_such_path() -> RequestError:
    """Return the refusal of a path that leads nowhere; the text is the API server's."""
    return RequestError(Reason.NOT_FOUND, "the server could not find the requested resource")
