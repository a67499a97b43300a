"""The messages of each receiver for each kind of alert, which scripts/messages.py writes."""

import msgspec
import pytest

from muster import vocabulary
from muster.vocabulary import NotificationReason
from muster_notifier.receivers import headline, message
from scripts import message_pictures, messages

SAMPLES = messages.samples()


def test_the_files_are_what_the_receivers_show_now() -> None:
    kept = {path: path.read_text("utf-8") for path in messages.FOLDER.glob("*.txt")}
    assert kept == messages.documents(), "run: python scripts/messages.py"


def test_the_pictures_show_what_the_receivers_send_now() -> None:
    kept = {path: path.read_text("utf-8") for path in message_pictures.FOLDER.glob("message-*")}
    assert kept == message_pictures.documents(), "run: python scripts/message_pictures.py"


@pytest.mark.parametrize("name", SAMPLES)
def test_what_where_and_the_impact_are_on_the_lock_screen(name: str) -> None:
    alert = SAMPLES[name]
    words = message.PLAIN.compose(messages.notify(alert))
    what, _ = headline.what_and_reason(alert)
    pods = max(len(alert.pods), alert.pods_total)
    impact = headline.impact(alert, pods)
    assert len(words.title) <= headline.TITLE_MAX
    assert words.title.endswith(f"; {impact}")
    assert alert.node == vocabulary.FLEET or alert.node in words.title
    assert what.split()[0] in words.title


@pytest.mark.parametrize("name", SAMPLES)
def test_the_text_does_not_repeat_the_title(name: str) -> None:
    words = message.PLAIN.compose(messages.notify(SAMPLES[name]))
    what, _, impact = words.title.rpartition("; ")
    assert what not in words.text
    assert impact not in words.text


@pytest.mark.parametrize("name", SAMPLES)
def test_when_it_is_resolved_it_says_how_long_it_lasted(name: str) -> None:
    over = messages.notify(SAMPLES[name], reason=NotificationReason.ALL_RESOLVED)
    what, _ = headline.what_and_reason(SAMPLES[name])
    # as in the title of the firing alert
    what = what.replace(messages.GPU, f"{messages.GPU[:12]}…")
    assert message.PLAIN.compose(over).title == f"Resolved after 12 min: {what}"


def test_a_long_node_name_is_shown_without_its_domain() -> None:
    alert = SAMPLES["mismatch"]
    node = f"{alert.node}.eu-central-1.compute.internal"
    summary = alert.summary.replace(alert.node, node)
    long = msgspec.structs.replace(alert, node=node, summary=summary)
    assert message.PLAIN.compose(messages.notify(long)).title == (
        message.PLAIN.compose(messages.notify(alert)).title
    )
