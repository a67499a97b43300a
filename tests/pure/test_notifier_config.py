from pathlib import Path

import pytest

from muster.service import settings
from muster_notifier.config import receiver_settings, schema


def load(text: str, tmp_path: Path) -> schema.Settings:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    return settings.load(schema.Settings, prefix="MUSTER_NOTIFIER", file=file, environment={})


def problems(text: str, tmp_path: Path) -> list[str]:
    with pytest.raises(settings.BadSettings) as refused:
        load(text, tmp_path)
    return [
        problem_texts.partition("settings.yaml: ")[2] for problem_texts in refused.value.problems
    ]


def test_the_defaults_are_alertmanagers_times_and_the_console(tmp_path: Path) -> None:
    loaded = load("", tmp_path)
    assert loaded == schema.Settings()
    assert (loaded.group_wait_s, loaded.group_interval_s, loaded.repeat_interval_s) == (
        30,
        300,
        14_400,
    )
    assert loaded.resolve_wait_s == 10, "of our own: an end is sent sooner than other changes"
    assert loaded.receivers == (
        receiver_settings.Receiver(name="console", console=receiver_settings.Console()),
    )


def test_a_webhook_and_the_console_are_receivers(tmp_path: Path) -> None:
    loaded = load(
        """
        group_by: [kind]
        group_wait_s: 0
        receivers:
          - {name: ops, webhook: {url: "https://ops.example/hook?x=1", timeout_s: 2}}
          - {name: quiet, console: {}, send_resolved: false}
        """,
        tmp_path,
    )
    assert loaded == schema.Settings(
        group_by=("kind",),
        group_wait_s=0.0,
        receivers=(
            receiver_settings.Receiver(
                name="ops",
                webhook=receiver_settings.Webhook(
                    url="https://ops.example/hook?x=1", timeout_s=2.0
                ),
            ),
            receiver_settings.Receiver(
                name="quiet", console=receiver_settings.Console(), send_resolved=False
            ),
        ),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("receivers: []", "receivers: expected 1 to 64, not 0"),
        (
            "receivers: [{name: a, console: {}}, {name: a, console: {}}]",
            "receivers: used twice: a",
        ),
        (
            "receivers: [{name: a}]",
            "receivers[0]: receiver a: set exactly one of webhook, slack,",
        ),
        (
            "receivers: [{name: a, console: {}, webhook: {url: 'http://h'}}]",
            "receivers[0]: receiver a: set exactly one of webhook, slack,",
        ),
        (
            "receivers: [{name: a, webhok: {url: 'http://h'}}]",
            "receivers[0].webhok: unknown key (value {url: 'http://h'}); did you mean webhook?",
        ),
        ("group_by: [node, node]", "group_by: used twice: node"),
        ("group_by: [sevrity]", "group_by: no alert has a label sevrity; known labels: al"),
        ("routes: [{receivers: [b]}]", "no receiver is called b"),
        ("mute_times: [nights]", "no time interval is called nights"),
        ("routes: [{matchers: ['node~x']}]", "routes[0]: 'node~x': expected a matcher such as"),
        (
            "routes: [{matchers: ['node=~(']}]",
            "routes[0]: node=~'(': not a regular expression, near",
        ),
        (
            "receivers: [{name: a, webhook: {url: 'http://h', url_from: {env: X}}}]",
            "receivers[0].webhook: set exactly one of: url, url_from",
        ),
        (
            'receivers: [{name: a, email: {host: h, sender: a@b.c, to: ["a@b.c,\\nb@b.c"]}}]',
            "receivers[0].email.to: 'a@b.c,\\nb@b.c' is not an address such as ops@example.com",
        ),
        (
            "receivers: [{name: a, email: {host: h, sender: nonsense, to: [a@b.c]}}]",
            "receivers[0].email.sender: 'nonsense' is not an address such as ops@example.com",
        ),
        (
            "receivers: [{name: a, webhook: {url: 'https://u:secret@h/'}}]",
            "receivers[0].webhook.url: contains a password; use url_from instead",
        ),
        (
            "routes: [{matchers: ['sevirity=critical']}]",
            'routes[0]: sevirity="critical": no alert has a label sevirity; did you mean severity?',
        ),
        (
            "routes: [{matchers: ['kind=nodedown']}]",
            'routes[0]: kind="nodedown": no kind is called nodedown; did you mean node_down?',
        ),
        (
            (
                "inhibit_rules: [{source_matchers: [kind=stuck], target_matchers: [kind=stuck],"
                " equal: [nod]}]"
            ),
            "inhibit_rules[0].equal: no alert has a label nod; known labels: ",
        ),
        (
            "receivers: [{name: a, slack: {token: xoxb-SECRET, channel: x}}]",
            "receivers[0].slack.token: unknown key (value '(not shown)'); did you mean token_from?",
        ),
        (
            "receivers: [{name: a, slack: {token_from: xoxb-SECRET, channel: x}}]",
            "receivers[0].slack.token_from: expected a mapping of keys, found '(not shown)'",
        ),
        (
            "receivers: [{name: a, webhook: {url: 'ftp://u:PASS@h/x?token=T'}}]",
            "receivers[0].webhook.url: 'ftp://(not shown)@h/x?(not shown)' is not of the form",
        ),
        (
            "time_intervals: [{name: n, time_intervals: [{weekdays: [funday]}]}]",
            "time_intervals[0].time_intervals[0].weekdays: 'funday' is neither a valid",
        ),
        ("group_interval_s: 0", "group_interval_s: expected a number of at least 0.05, found 0"),
        (
            "receivers: [{name: a, webhook: {url: 'ftp://h'}}]",
            "receivers[0].webhook.url: 'ftp://h' is not of the form",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_path(
    text: str, problem: str, tmp_path: Path
) -> None:
    assert [loaded[: len(problem)] for loaded in problems(text, tmp_path)] == [problem]
