"""When the plugin's `Node` reports that its checks are stuck."""

from typing import TypeVar

from muster import machine
from muster_plugin import node as plugin_node
from muster_plugin.config import resources, settings

In = TypeVar("In")
Out = TypeVar("Out")


def no_runner() -> machine.MachineRunner[In, Out]:
    raise AssertionError("no machine is started")


def test_a_check_counts_as_stuck_from_the_start_even_if_none_has_ever_ended() -> None:
    entry = resources.Entry(path="/dev/null")
    rule = resources.Resource(name="a.example/n", groups=(resources.Group(devices=(entry,)),))
    chosen = settings.Settings(kubelet=settings.Kubelet(directory="/kubelet"), resources=(rule,))

    node = plugin_node.Node(chosen, "n1", new_runner=no_runner)
    assert node.stuck(node.started_at + 120) is None
    assert node.stuck(node.started_at + 121) == "no check of the sockets has ended for 121 s"
