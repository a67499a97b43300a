"""The faults of `muster break`: their names and descriptions, and how each is undone."""

from pathlib import Path

import pytest

from muster.cli import faults

NODES = ("node-a", "node-b", "node-c")


def test_every_fault_has_a_plan_and_says_what_is_seen() -> None:
    for fault in faults.Fault:
        plan = faults.plan(faults.target(fault, None, NODES))
        assert all((plan.breaks, plan.seen, plan.watch, plan.steps)), fault


def test_only_the_fault_that_muster_repairs_itself_has_nothing_to_undo() -> None:
    plans = {fault: faults.plan(faults.Target(fault, "node-a")) for fault in faults.Fault}
    assert [fault for fault, plan in plans.items() if not plan.undoing] == [faults.Fault.SOCKET]


def test_what_undoes_a_fault_concerns_what_the_fault_concerned() -> None:
    for fault in faults.Fault:
        plan = faults.plan(faults.target(fault, "node-b" if fault.is_of_node else None, NODES))
        broken, mended = (
            {getattr(step, "program", getattr(step, "node", "")) for step in steps}
            for steps in (plan.steps, plan.undoing)
        )
        assert mended <= broken


def test_a_fault_is_made_on_the_last_node_unless_a_node_is_named() -> None:
    freeze, nats = faults.Fault.FREEZE, faults.Fault.NATS
    assert faults.target(freeze, None, NODES) == faults.Target(freeze, "node-c")
    assert faults.target(freeze, "node-a", NODES) == faults.Target(freeze, "node-a")
    assert faults.target(nats, None, NODES) == faults.Target(nats)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("frezze", "did you mean freeze?"),
        ("q", "the faults are freeze, kill, stream, socket, kubelet, xid, health, nats"),
    ],
)
def test_an_unknown_fault_is_answered_with_the_nearest_or_with_all(name: str, hint: str) -> None:
    with pytest.raises(faults.UnknownName) as raised:
        faults.fault(name)
    assert str(raised.value) == f"no fault {name!r}; {hint}"


@pytest.mark.parametrize(
    ("fault", "node", "error"),
    [
        (faults.Fault.XID, "nodeb", "no node 'nodeb'; did you mean node-b?"),
        (faults.Fault.XID, "", "no node ''; the nodes are node-a, node-b, node-c"),
        (faults.Fault.NATS, "node-a", "nats concerns the whole fleet; leave out 'node-a'"),
    ],
)
def test_an_impossible_node_is_refused(fault: faults.Fault, node: str, error: str) -> None:
    with pytest.raises(faults.UnknownName) as raised:
        faults.target(fault, node, NODES)
    assert str(raised.value) == error


def test_a_target_is_stored_by_name_and_foreign_names_are_skipped() -> None:
    made = [faults.target(fault, None, NODES) for fault in faults.Fault]
    names = [str(target) for target in made]
    assert set(faults.targets([*names, "earthquake node-a", ""])) == set(made)


def test_the_documents_list_every_fault_with_what_is_seen_first() -> None:
    text = (Path(__file__).parents[2] / "docs/commands.md").read_text()
    for fault in faults.Fault:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{fault}` |")]
        shown = line.split("|")[3].strip().partition(" ")[0].strip("`")
        seen = faults.plan(faults.Target(fault)).seen
        assert shown in seen or shown == "health_silent", fault


def test_a_command_reaches_one_of_several_stacks_with_its_addresses() -> None:
    health, nats_url = "http://127.0.0.1:1", "nats://127.0.0.1:2"
    assert {
        plan.watch: faults.reaching(plan.watch, health=health, nats_url=nats_url)
        for plan in (faults.plan(faults.Target(fault, "n")) for fault in faults.Fault)
    } == {
        "muster why n": "muster why n --health http://127.0.0.1:1",
        "muster events --node n --since 1m": (
            "muster events --node n --since 1m --url nats://127.0.0.1:2"
        ),
        "muster doctor": "muster doctor --health http://127.0.0.1:1 --url nats://127.0.0.1:2",
    }
