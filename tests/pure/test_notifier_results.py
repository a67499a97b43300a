import pytest

from muster_notifier.receivers import results
from muster_notifier.receivers.results import Kind, Outcome, Result


@pytest.mark.parametrize(
    ("status", "headers", "answer"),
    [
        (200, {}, Result(outcome=Outcome.ACCEPTED, detail="HTTP 200")),
        (204, {}, Result(outcome=Outcome.ACCEPTED, detail="HTTP 204")),
        (
            301,
            {"location": "http://elsewhere/"},
            Result(outcome=Outcome.REDIRECTED, detail="HTTP 301 to http://elsewhere"),
        ),
        (
            308,
            {"location": "https://u:p@h.example/services/SECRET"},
            Result(outcome=Outcome.REDIRECTED, detail="HTTP 308 to https://h.example"),
        ),
        (
            308,
            {"location": "/services/SECRET"},
            Result(outcome=Outcome.REDIRECTED, detail="HTTP 308 to elsewhere on the same host"),
        ),
        (304, {}, Result(outcome=Outcome.REDIRECTED, detail="HTTP 304")),
        (400, {}, Result(outcome=Outcome.REJECTED, detail="HTTP 400")),
        (404, {}, Result(outcome=Outcome.NOT_FOUND, detail="HTTP 404")),
        (408, {}, Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 408")),
        (410, {}, Result(outcome=Outcome.GONE, detail="HTTP 410")),
        (413, {}, Result(outcome=Outcome.TOO_LARGE, detail="HTTP 413")),
        (429, {}, Result(outcome=Outcome.RATE_LIMITED, detail="HTTP 429")),
        (
            429,
            {"retry-after": "999999999999"},
            Result(outcome=Outcome.RATE_LIMITED, detail="HTTP 429", retry_after_s=3600.0),
        ),
        (
            429,
            {"retry-after": "7"},
            Result(outcome=Outcome.RATE_LIMITED, detail="HTTP 429", retry_after_s=7.0),
        ),
        (500, {}, Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 500")),
        (
            503,
            {
                "retry-after": "Fri, 31 Dec 1999 23:59:59 GMT",
                "date": "Fri, 31 Dec 1999 23:59:29 GMT",
            },
            Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 503", retry_after_s=30.0),
        ),
        (
            503,
            {
                "retry-after": "Fri, 31 Dec 1999 23:59:00 GMT",
                "date": "Fri, 31 Dec 1999 23:59:29 GMT",
            },
            Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 503", retry_after_s=0.0),
        ),
        (503, {"retry-after": "soon"}, Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 503")),
        (503, {"retry-after": "-3"}, Result(outcome=Outcome.SERVER_ERROR, detail="HTTP 503")),
    ],
)
def test_each_status_is_taken_temporary_or_refused(
    status: int, headers: dict[str, str], answer: Result
) -> None:
    assert results.of_status(status, headers) == answer


@pytest.mark.parametrize(
    ("attempts", "bound_s"), [(1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (100_000, 30.0)]
)
def test_waits_are_fully_jittered_under_a_bound_that_doubles_to_half_a_minute(
    attempts: int, bound_s: float
) -> None:
    answer = Result(outcome=Outcome.SERVER_ERROR, detail="")
    waits = [results.delay_s(attempts, answer, chance=chance) for chance in (0.0, 0.5, 1.0)]
    assert waits == [0.0, bound_s / 2, bound_s]


def test_what_the_receiver_asked_for_wins() -> None:
    answer = Result(outcome=Outcome.SERVER_ERROR, detail="", retry_after_s=120.0)
    assert results.delay_s(1, answer, chance=0.1) == 120.0


@pytest.mark.parametrize(
    "retry_after",
    [
        "Wed, 21 Oct 2026 07:28:00 -0000",
        "Wed, 21 Oct 2026 07:28:00",
        "Wed, 21 Oct 99999 07:28:00 GMT",
        "Wed, 21 Oct 9999 07:28:00 -2359",
        "Wed, 21 Oct 0001 07:28:00 +2359",
    ],
)
def test_no_date_of_a_receiver_crashes_us(retry_after: str) -> None:
    headers = {"retry-after": retry_after, "date": "Wed, 21 Oct 2026 07:27:00 GMT"}
    answer = results.of_status(503, headers)
    assert answer.kind is Kind.TEMPORARY
    assert answer.retry_after_s is None or 0 <= answer.retry_after_s <= 3600


def test_a_receiver_that_asks_for_no_wait_is_not_flooded() -> None:
    answer = results.of_status(503, {"retry-after": "0"})
    assert [results.delay_s(n, answer, chance=1.0) for n in (1, 2, 3)] == [0.5, 1.0, 2.0]
