"""How many requests and mounts the FUSE broker allows."""

import contextlib
from collections import Counter

import hypothesis
import hypothesis.strategies as st
import pytest

from muster_fuse import config
from muster_fuse.request import decision, limits


def test_a_pod_makes_as_many_requests_as_it_may_and_no_others_suffer() -> None:
    limiter = limits.Limiter(config.Limits(requests_burst=2, requests_per_minute=60))
    limiter.take("a", now=0.0)
    limiter.take("a", now=0.0)
    with pytest.raises(decision.Refusal, match="this pod may make 60 requests a minute") as refused:
        limiter.take("a", now=0.5)
    assert refused.value.reason is decision.Reason.TOO_FAST
    limiter.take("b", now=0.5)
    limiter.take("a", now=1.0)


def test_a_pod_and_a_node_have_as_many_mounts_as_they_may() -> None:
    limiter = limits.Limiter(config.Limits(mounts_per_pod=2, mounts_per_node=3))
    with limiter.making("a", {"a": 1}):
        with pytest.raises(decision.Refusal, match="this pod has 2 FUSE mounts") as refused:
            limiter.making("a", {"a": 1}).__enter__()
        assert refused.value.reason is decision.Reason.TOO_MANY_IN_POD
        with pytest.raises(decision.Refusal, match="this node has 3 FUSE mounts") as refused:
            limiter.making("b", {"a": 1, "b": 1}).__enter__()
        assert refused.value.reason is decision.Reason.TOO_MANY_ON_NODE
    with limiter.making("a", {"a": 1}):
        pass


steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["begin", "mounted", "failed", "gone"])),
    max_size=60,
)


@hypothesis.given(steps)
def test_no_order_of_requests_exceeds_a_limit(orders: list[tuple[str, str]]) -> None:
    limiter = limits.Limiter(config.Limits(mounts_per_pod=3, mounts_per_node=5))
    mounts: Counter[str] = Counter()
    making: dict[str, list[contextlib.ExitStack]] = {"a": [], "b": [], "c": []}
    for pod, step in orders:
        before = {uid: mounts[uid] + len(making[uid]) for uid in making}
        if step == "begin":
            stack = contextlib.ExitStack()
            try:
                stack.enter_context(limiter.making(pod, mounts))
            except decision.Refusal:
                assert before[pod] == 3 or sum(before.values()) == 5
            else:
                making[pod].append(stack)
        elif step == "gone":
            mounts[pod] -= bool(mounts[pod])
        elif making[pod]:
            making[pod].pop().close()
            mounts[pod] += step == "mounted"
        assert all(mounts[uid] + len(making[uid]) <= 3 for uid in making)
        assert mounts.total() + sum(map(len, making.values())) <= 5


@hypothesis.given(st.lists(st.floats(0, 30), max_size=80))
def test_no_order_of_times_exceeds_the_rate(pauses: list[float]) -> None:
    settings = config.Limits(requests_burst=5, requests_per_minute=30)
    limiter = limits.Limiter(settings)
    now, granted = 0.0, 0
    for pause in pauses:
        now += pause
        with contextlib.suppress(decision.Refusal):
            limiter.take("a", now=now)
            granted += 1
    assert granted <= settings.requests_burst + now * settings.requests_per_minute / 60 + 1e-6
