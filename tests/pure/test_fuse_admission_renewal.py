"""When the webhook's certificate is replaced."""

import hypothesis
import hypothesis.strategies as st
import pytest

from muster_fuse.admission import config, renewal
from muster_fuse.admission.renewal import BACKDATED_S, Step, Validity

AT = 1_000_000.0
LIFE_S = 9_000.0
SETTLE_S = 600.0


def made(ago_s: float) -> Validity:
    return Validity(AT - ago_s - BACKDATED_S, AT - ago_s + LIFE_S)


@pytest.mark.parametrize(
    ("current", "following", "step"),
    [
        (None, None, Step.ISSUE),
        (None, made(0), Step.PROMOTE),
        (None, made(LIFE_S), Step.ISSUE),
        (made(LIFE_S), None, Step.ISSUE),
        (made(LIFE_S), made(1), Step.PROMOTE),
        # issued by a machine whose clock is fast
        (made(-BACKDATED_S), None, Step.KEEP),
        (made(-BACKDATED_S - 1), None, Step.ISSUE),
        (made(0), None, Step.KEEP),
        (made(LIFE_S * 2 / 3 - 1), None, Step.KEEP),
        (made(LIFE_S * 2 / 3), None, Step.PREPARE),
        (made(LIFE_S * 2 / 3), made(LIFE_S), Step.PREPARE),
        (made(LIFE_S * 2 / 3), made(SETTLE_S - 1), Step.KEEP),
        (made(LIFE_S * 2 / 3), made(SETTLE_S), Step.PROMOTE),
        (made(LIFE_S - SETTLE_S - 1), made(1), Step.KEEP),
        (made(LIFE_S - SETTLE_S), made(1), Step.PROMOTE),
    ],
)
def test_the_step_is_the_tables(
    current: Validity | None, following: Validity | None, step: Step
) -> None:
    assert renewal.decide(current, following, at=AT, settle_s=SETTLE_S) is step


@hypothesis.given(st.lists(st.floats(1.0, (LIFE_S / 4 - SETTLE_S) / 2), min_size=1, max_size=60))
def test_checked_in_time_the_certificate_is_valid_and_trusted_before_its_use(
    pauses: list[float],
) -> None:
    at, current, following = AT, made(0), None
    for pause_s in pauses:
        at += pause_s
        assert current.includes(at)
        match renewal.decide(current, following, at=at, settle_s=SETTLE_S):
            case Step.PREPARE:
                following = Validity(at - BACKDATED_S, at + LIFE_S)
            case Step.PROMOTE:
                assert following is not None
                assert at - following.made_at >= SETTLE_S or current.ends_at - at <= SETTLE_S
                current, following = following, None
            case step:
                assert step is Step.KEEP


def test_settings_that_would_let_the_certificate_expire_are_refused() -> None:
    with pytest.raises(ValueError, match="at most a quarter of lifetime_s"):
        config.Certificates(lifetime_s=2_000, settle_s=381)
    assert config.Certificates(lifetime_s=2_000, settle_s=380)
