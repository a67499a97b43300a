"""A subscriber to everything is not mistaken for a plugin that is subscribed."""

from pathlib import Path

import pytest

from muster.local import nats
from muster.nats import bus
from tests.worlds import shipped_nats


def test_an_admin_that_subscribes_to_everything_hides_no_dead_plugin(tmp_path: Path) -> None:
    async def story(server: nats.NatsServer) -> None:
        async with (
            shipped_nats.client(server, "admin") as admin,
            bus.Bus(shipped_nats.address(server, "health"), producer="h", name="h") as health,
        ):
            subscription = await admin.raw.subscribe(">")
            await admin.flush()
            await health.link.client()
            with pytest.raises(bus.NobodyAnswered) as error:
                await health.request("muster.rpc.node-a.p.probe", timeout_s=2.0)
            assert error.value.subscribed is False
            async with shipped_nats.client(server, "plugin_node-a") as plugin:
                await plugin.raw.publish("muster.heartbeat.node-a.device-plugin", b"beat")
                while (await subscription.next_msg(timeout=30.0)).data != b"beat":
                    pass

    shipped_nats.run(tmp_path, story)
