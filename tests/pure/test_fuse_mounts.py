"""The conditions of the FUSE mounts of pods, as repeated checks find them."""

from typing import Final

import hypothesis
import hypothesis.strategies as st

from muster import vocabulary
from muster_fuse import config
from muster_fuse.watch import mounts

DEAD: Final = vocabulary.FuseCondition.DEAD
HUNG: Final = vocabulary.FuseCondition.HUNG
LINGERING: Final = vocabulary.FuseCondition.LINGERING
LIMITS: Final = config.Limits(hung_s=60.0, lingering_s=120.0)
IDLE: Final = mounts.Look(waiting=0, is_held=True, worked_ticks=0, is_killed=False)


def mount(connection: int = 40, pod_uid: str = "a") -> mounts.Mount:
    return mounts.Mount(
        pod_uid=pod_uid,
        connection=connection,
        inode=connection * 10,
        created_ns=1,
        mount_point="/mnt",
        source="x",
        subtype="sshfs",
        user_id=1000,
    )


class Watch:
    """A mount that is checked every five seconds."""

    def __init__(self) -> None:
        self.mounts = mounts.Mounts(LIMITS)
        self.mounts.add(mount())
        self.now = 0.0

    def look(self, look: mounts.Look | None, *, times: int = 1) -> list[tuple[str, bool, str]]:
        """Check the mount; return which conditions began and ended."""
        changes = []
        for _ in range(times):
            changes += self.mounts.look({mount().id: look}, now=self.now)
            self.now += 5.0
        assert all(change.mount == mount() for change in changes)
        return [(change.condition, change.holds, change.text) for change in changes]


def waits(count: int, *, worked: int = 0, killed: bool = False) -> mounts.Look:
    return IDLE._replace(waiting=count, worked_ticks=worked, is_killed=killed)


BEGINS_DEAD: Final = (DEAD, True, "no process has /dev/fuse open for this mount any more")
BEGINS_HUNG: Final = (HUNG, True, "2 requests wait for the daemon of this mount")


def test_a_mount_that_is_used_has_no_condition() -> None:
    watch = Watch()
    assert watch.look(IDLE, times=100) == []
    for look in range(100):
        assert watch.look(waits(2 + look % 2)) == []
    assert watch.mounts.conditions(mount()) == ()


def test_a_mount_whose_daemon_has_ended_is_dead_after_two_looks() -> None:
    watch = Watch()
    unheld = IDLE._replace(is_held=False)
    assert watch.look(IDLE) == []
    assert watch.look(unheld) == []
    assert watch.look(IDLE) == []
    assert watch.look(unheld, times=9) == [BEGINS_DEAD]
    assert watch.mounts.conditions(mount()) == (DEAD,)
    assert watch.look(IDLE) == [(DEAD, False, "")]


def test_a_mount_whose_requests_wait_for_a_minute_is_hung() -> None:
    watch = Watch()
    assert watch.look(waits(2), times=12) == []
    assert watch.look(waits(2), times=50) == [BEGINS_HUNG]
    assert watch.look(waits(3)) == []
    assert watch.look(waits(2)) == [(HUNG, False, "")]


def test_a_daemon_that_works_does_not_hang_though_as_many_wait_as_before() -> None:
    watch = Watch()
    for look in range(100):
        assert watch.look(waits(1, worked=look)) == []
    # it stops: at the end of the second minute, it has not worked at all
    assert watch.look(waits(2, worked=99), times=30) == [BEGINS_HUNG]
    # it continues, which is found at the end of the next minute
    assert watch.look(waits(2, worked=200), times=13) == [(HUNG, False, "")]


def test_a_daemon_that_another_process_follows_does_not_hang() -> None:
    watch = Watch()
    assert watch.look(waits(2, worked=500), times=12) == []
    assert watch.look(waits(2, worked=3), times=12) == []


def test_a_hung_mount_that_keeps_killed_processes_is_lingering() -> None:
    watch = Watch()
    watch.look(waits(2), times=13)
    text = "processes of the mount's pod have been killed and cannot end"
    assert watch.look(waits(2, killed=True), times=24) == []
    assert watch.look(waits(2, killed=True), times=9) == [(LINGERING, True, text)]
    assert watch.mounts.conditions(mount()) == (HUNG, LINGERING)
    assert watch.look(waits(2)) == [(LINGERING, False, "")]
    assert watch.look(waits(2, killed=True), times=24) == []
    assert watch.look(IDLE) == [(HUNG, False, "")]


def test_a_mount_that_is_gone_is_forgotten_with_its_conditions() -> None:
    watch = Watch()
    watch.look(IDLE._replace(is_held=False), times=2)
    assert watch.look(None) == [(DEAD, False, "")]
    assert watch.mounts.all() == ()
    assert watch.mounts.conditions(mount()) == ()
    assert watch.look(IDLE) == []


def test_mounts_are_known_by_pod() -> None:
    watched = mounts.Mounts(LIMITS)
    for made in (mount(1, "a"), mount(2, "b"), mount(3, "a")):
        watched.add(made)
    assert watched.of("a") == (mount(1, "a"), mount(3, "a"))
    watched.forget(mount(1, "a"))
    watched.forget(mount(9, "a"))
    assert watched.all() == (mount(2, "b"), mount(3, "a"))


some_looks = st.lists(
    st.tuples(
        st.floats(0.1, 90.0),
        st.one_of(
            st.none(),
            st.builds(
                mounts.Look, st.integers(0, 3), st.booleans(), st.integers(0, 20), st.booleans()
            ),
        ),
    ),
    max_size=60,
)


@hypothesis.given(some_looks)
def test_conditions_agree_with_what_was_seen(looks: list[tuple[float, mounts.Look | None]]) -> None:
    watched, now = mounts.Mounts(LIMITS), 0.0
    watched.add(mount())
    held: set[vocabulary.FuseCondition] = set()
    seen: list[tuple[float, mounts.Look]] = []
    for pause, look in looks:
        now += pause
        for change in watched.look({mount().id: look}, now=now):
            # no condition begins twice or ends without having begun
            assert change.holds is (change.condition not in held)
            held ^= {change.condition}
        assert set(watched.conditions(mount())) == held
        if look is None:
            assert not held
            assert watched.all() == ()
            return
        seen.append((now, look))
        assert (DEAD in held) == (len(seen) > 1 and not any(s.is_held for _, s in seen[-2:]))
        assert not (DEAD in held and HUNG in held)
        if HUNG in held:
            waited = [at for at, known in seen if known.waiting]
            assert look.waiting
            assert now - waited[0] >= LIMITS.hung_s
        if LINGERING in held:
            assert HUNG in held
            assert look.is_killed
            assert now - seen[0][0] >= LIMITS.lingering_s
