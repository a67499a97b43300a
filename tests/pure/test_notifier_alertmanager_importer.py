"""The import of an Alertmanager's configuration file."""

import os
from pathlib import Path

import pytest

from muster.service import settings
from muster_notifier import cli
from muster_notifier.config import files, receiver_settings, schema
from muster_notifier.routing import muting

REACH = (
    "imported with reach: loopback, because Alertmanager may send anywhere; if the address is "
    "public, remove reach, so that private addresses and this machine are refused"
)
FILE = """
global:
  resolve_timeout: 5m
  smtp_smarthost: 'mail.example:587'
  smtp_from: 'alertmanager@example.com'
  smtp_auth_username: am
  smtp_auth_password: 'pass word'
  slack_api_url: 'https://hooks.slack.com/services/T/B/secret'
templates: ['/etc/alertmanager/*.tmpl']
route:
  receiver: 'team X mails'
  group_by: [alertname, cluster]
  group_wait: 10s
  repeat_interval: 1h30m
  routes:
    - matchers: ['severity="critical"', 'node=~"gpu-.*"']
      receiver: pager
      continue: true
      active_time_intervals: [office]
    - match: {kind: flapping}
      match_re: {node: 'a|b'}
      receiver: 'null'
      mute_time_intervals: [office]
      routes:
        - receiver: slack
          group_by: ['...']
receivers:
  - name: 'team X mails'
    email_configs:
      - to: 'a@example.com, b@example.com'
        html: '{{ x }}'
  - name: pager
    pagerduty_configs:
      - routing_key_file: /run/secrets/pagerduty
    webhook_configs:
      - url: http://10.0.0.1/hook
        send_resolved: false
        max_alerts: 5
        http_config: {authorization: {credentials: tok}, proxy_url: 'http://p'}
    opsgenie_configs:
      - api_key: x
  - name: 'null'
  - name: slack
    slack_configs:
      - channel: '#gpu'
    msteamsv2_configs:
      - webhook_url: https://teams.example/x
inhibit_rules:
  - source_matchers: ['kind="node_down"']
    target_match_re: {kind: 'stuck|missing'}
    equal: [node]
time_intervals:
  - name: office
    time_intervals:
      - times: [{start_time: '09:00', end_time: '17:00'}]
        weekdays: ['monday:friday']
        years: [2026]
        location: Europe/Berlin
"""


def load(text: str, tmp_path: Path) -> tuple[schema.Settings, list[str]]:
    file = tmp_path / "alertmanager.yml"
    file.write_text(text)
    imported = files.read(file, written_for="alertmanager", environment={})
    return imported, files.translate(text.encode(), str(file))[1].left_out


def test_its_receivers_become_ours_and_their_secrets_stay_in_the_file(tmp_path: Path) -> None:
    imported, _ = load(FILE, tmp_path)
    file = str(tmp_path / "alertmanager.yml")
    loopback = receiver_settings.Reach.LOOPBACK
    inside = {
        name: receiver_settings.Secret(file=file, at=at)
        for name, at in {
            "password": "global.smtp_auth_password",
            "hook": "receivers.1.webhook_configs.0.url",
            "bearer": "receivers.1.webhook_configs.0.http_config.authorization.credentials",
            "slack": "global.slack_api_url",
            "teams": "receivers.3.msteamsv2_configs.0.webhook_url",
        }.items()
    }
    assert imported.receivers == (
        receiver_settings.Receiver(
            name="team-X-mails",
            send_resolved=False,
            email=receiver_settings.Email(
                host="mail.example",
                port=587,
                sender="alertmanager@example.com",
                to=("a@example.com", "b@example.com"),
                username="am",
                password_from=inside["password"],
            ),
        ),
        receiver_settings.Receiver(
            name="pager",
            send_resolved=False,
            webhook=receiver_settings.Webhook(
                url_from=inside["hook"],
                format=receiver_settings.Format.ALERTMANAGER,
                reach=loopback,
                max_alerts=5,
                bearer_from=inside["bearer"],
            ),
        ),
        receiver_settings.Receiver(
            name="pager-2",
            pagerduty=receiver_settings.PagerDuty(
                routing_key_from=receiver_settings.Secret(file="/run/secrets/pagerduty"),
            ),
        ),
        receiver_settings.Receiver(
            name="slack",
            send_resolved=False,
            slack=receiver_settings.Slack(webhook_from=inside["slack"]),
        ),
        receiver_settings.Receiver(
            name="slack-2", teams=receiver_settings.Teams(url_from=inside["teams"], reach=loopback)
        ),
    )
    values = {name: files.secret(where) for name, where in inside.items()}
    assert values == {
        "password": "pass word",
        "hook": "http://10.0.0.1/hook",
        "bearer": "tok",
        "slack": "https://hooks.slack.com/services/T/B/secret",
        "teams": "https://teams.example/x",
    }


@pytest.mark.parametrize(
    ("more", "reach"),
    [
        ("slack_configs: [{api_url: 'https://hooks.slack.com/services/T'}]", None),
        ("slack_configs: [{api_url: 'https://hooks.slack-gov.com/services/T'}]", None),
        ("slack_configs: [{api_url: 'http://127.0.0.1:9/hook'}]", "slack_configs.0.api_url"),
        (
            "slack_configs: [{api_url: 'https://slack.com.evil.example/T'}]",
            "slack_configs.0.api_url",
        ),
        ("slack_configs: [{api_url_file: /run/secrets/slack}]", "slack_configs.0.api_url"),
        ("pagerduty_configs: [{routing_key: k}]", None),
        ("pagerduty_configs: [{routing_key: k, url: 'https://events.eu.pagerduty.com/v2'}]", None),
        (
            "pagerduty_configs: [{routing_key: k, url: 'http://10.0.0.1/'}]",
            "pagerduty_configs.0.url",
        ),
        ("pagerduty_configs: [{routing_key: k, url: 'http://[/'}]", "pagerduty_configs.0.url"),
        ("webhook_configs: [{url_file: /run/secrets/url}]", "webhook_configs.0.url"),
    ],
)
def test_only_what_may_be_private_reaches_private_addresses_and_that_is_reported(
    more: str, reach: str | None
) -> None:
    text = (
        "global: {slack_api_url: 'https://hooks.slack.com/services/general'}\n"
        f"route: {{receiver: a}}\nreceivers: [{{name: a, {more}}}]\n"
    )
    tree, importer = files.translate(text.encode(), "alertmanager.yml")
    (receiver,) = tree["receivers"]
    (way,) = [value for value in receiver.values() if isinstance(value, dict)]
    assert way.get("reach") == (reach and "loopback")
    assert importer.left_out == ([f"receivers.0.{reach}: {REACH}"] if reach else [])


def test_its_routes_become_ours(tmp_path: Path) -> None:
    root = schema.route_tree(load(FILE, tmp_path)[0])
    assert (root.receivers, root.group_by) == (("team-X-mails",), ("alertname",))
    timing = root.timing
    assert (timing.group_wait_s, timing.group_interval_s, timing.repeat_interval_s) == (
        10.0,
        300.0,
        5400.0,
    )
    assert timing.resolve_wait_s is None
    notified = [
        (labels, [name for route in root.find(labels) for name in route.receivers])
        for labels in (
            {"severity": "warning"},
            {"severity": "critical", "node": "gpu-1"},
            {"kind": "flapping", "node": "a"},
        )
    ]
    assert [receivers for _, receivers in notified] == [
        ["team-X-mails"],
        ["pager", "pager-2"],
        ["slack", "slack-2"],
    ]
    assert (root.children[0].continues, root.children[0].active_times) == (True, ("office",))
    assert (root.children[1].receivers, root.children[1].mute_times) == ((), ("office",))
    assert root.children[1].children[0].group_by == ("...",)


def test_its_rules_and_times_become_ours(tmp_path: Path) -> None:
    imported, _ = load(FILE, tmp_path)
    assert imported.inhibit_rules == (
        schema.InhibitRule(
            source_matchers=('kind="node_down"',),
            target_matchers=('kind=~"stuck|missing"',),
            equal=("node",),
        ),
    )
    assert imported.time_intervals == (
        schema.TimeInterval(
            name="office",
            time_intervals=(
                schema.Times(
                    times=(schema.TimeRange(start_time="09:00", end_time="17:00"),),
                    weekdays=("monday:friday",),
                    years=("2026",),
                    location="Europe/Berlin",
                ),
            ),
        ),
    )


def test_what_is_not_imported_is_reported(tmp_path: Path) -> None:
    more = FILE.replace("  smtp_from", "  smtp_hello: h\n  smtp_from")
    more = more.replace("equal: [node]", "equal: [node, cluster]")
    more = more.replace("{kind: flapping}", "{kind: flapping, team: ml}")
    more += "mute_time_intervals: []\ntracing: {endpoint: x}\n"
    more = more.replace(
        "  - name: 'null'", "  - name: away\n    sns_configs: [{}]\n  - name: 'null'"
    )
    assert load(more, tmp_path)[1] == [
        "receivers.0.email_configs.0.html: not imported",
        f"receivers.1.webhook_configs.0.url: {REACH}",
        "receivers.3: no part of it is imported, so nobody is notified of alerts routed to it",
        (
            "receivers.4.slack_configs.0.channel: not imported, because an incoming webhook has"
            " a fixed channel"
        ),
        f"receivers.4.msteamsv2_configs.0.webhook_url: {REACH}",
        "route.group_by: no muster alert has a label cluster",
        'route.routes.1.matchers: team="ml" is not imported: no alert has a label team',
        "inhibit_rules.0.equal: no muster alert has cluster; left out",
        "templates: not imported; docs/notifier.md describes muster's templates",
        "tracing: not imported",
        "global.resolve_timeout: not needed, because health reports when an alert is resolved",
        "global.smtp_hello: not imported",
    ]


SLACK = "slack_configs: [{api_url: 'https://hooks.slack.com/services/T'}]"
NOBODY_ELSE = (
    "route.receiver: no receiver is imported, "
    "so nobody is notified of alerts that match no other route"
)
NO_ROUTE = "no imported route leads to it, so it gets no muster alerts"
NO_PART = "no part of it is imported, so nobody is notified of alerts routed to it"
OTHER_KIND = "receivers of this kind are not imported and get no notifications"
NO_LOGIN = "not imported; the receiver may refuse notifications without it"
NO_KEY = "not imported, because routing_key is missing (service_key is for Events API v1)"
NO_RELAY_LOGIN = "not imported without auth_password, so the relay may refuse mail"
PUBLISHED = {
    "a first file: one webhook, nothing else": (
        """
route: {group_by: [alertname], group_wait: 30s, receiver: web.hook}
receivers: [{name: web.hook, webhook_configs: [{url: 'http://127.0.0.1:5001/'}]}]
inhibit_rules: [{source_matchers: [severity=critical], target_matchers: [severity=warning],
  equal: [alertname, dev, instance]}]
""",
        [],
    ),
    "the operator's default: everything to null": (
        """
global: {resolve_timeout: 5m}
route: {receiver: 'null', group_by: [namespace], routes: [{matchers: ['alertname="Watchdog"'],
  receiver: 'null'}]}
receivers: [{name: 'null'}]
""",
        [NOBODY_ELSE],
    ),
    "teams by a label that muster does not have": (
        f"""
route: {{receiver: default, routes: [{{match: {{team: ml}}, receiver: ml}}]}}
receivers: [{{name: default, {SLACK}}}, {{name: ml, {SLACK}}}]
""",
        [f"receiver ml: {NO_ROUTE}"],
    ),
    "PagerDuty's first API, and a kind that muster does not have": (
        f"""
route: {{receiver: pager, routes: [{{matchers: [severity=warning], receiver: chat}}]}}
receivers:
  - {{name: pager, pagerduty_configs: [{{service_key: k}}]}}
  - {{name: chat, {SLACK}, opsgenie_configs: [{{api_key: k}}]}}
""",
        [
            f"receivers.0.pagerduty_configs.0: {NO_KEY}",
            f"receivers.0: {NO_PART}",
            f"receivers.1.opsgenie_configs: {OTHER_KIND}",
            NOBODY_ELSE,
        ],
    ),
    "logins that are not imported": (
        """
global: {smtp_smarthost: 'mail.example:587', smtp_from: a@example.com, smtp_auth_username: a}
route: {receiver: ops}
receivers:
  - name: ops
    webhook_configs: [{url: 'https://a.example/', http_config: {basic_auth: {username: a}}}]
    email_configs: [{to: b@example.com}]
""",
        [
            f"receivers.0.webhook_configs.0.http_config.basic_auth: {NO_LOGIN}",
            f"receivers.0.email_configs.0.auth_username: {NO_RELAY_LOGIN}",
        ],
    ),
}
"""Files of published forms, each with the notifications that an import would lose."""


@pytest.mark.parametrize(("text", "losses"), PUBLISHED.values(), ids=PUBLISHED)
def test_an_import_that_leaves_somebody_without_a_notification_is_refused(
    text: str, losses: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "alertmanager.yml"
    file.write_text(text)
    assert files.translate(text.encode(), str(file))[1].losses == losses
    assert cli.run_import(file) == (1 if losses else 0)
    printed = capsys.readouterr()
    assert (printed.out == "") == bool(losses)
    assert all(loss in printed.err for loss in losses)
    assert (f"Lost: {len(losses)}\n" in printed.err) == bool(losses)
    # without any receiver there are no settings to print
    has_receivers = f"receivers.0: {NO_PART}" in losses or NOBODY_ELSE not in losses
    assert cli.run_import(file, accept_losses=True) == (0 if has_receivers else 2)
    assert ("receivers:" in capsys.readouterr().out) == has_receivers


def test_relative_paths_begin_in_the_directory_of_the_file(tmp_path: Path) -> None:
    text = """
global: {smtp_smarthost: 'mail.example:587', smtp_from: a@example.com}
route: {receiver: ops}
receivers:
  - name: ops
    slack_configs: [{api_url_file: secrets/slack}]
    email_configs: [{to: b@example.com, tls_config: {ca_file: ca.pem}}]
"""
    slack, mail = load(text, tmp_path)[0].receivers
    assert slack.slack is not None
    assert slack.slack.webhook_from == receiver_settings.Secret(file=f"{tmp_path}/secrets/slack")
    assert mail.email is not None
    assert mail.email.ca_file == f"{tmp_path}/ca.pem"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("Secret", "this is a Secret manifest; extract the file first: kubectl get secret "),
        (
            "ConfigMap",
            "this is a ConfigMap manifest; extract the file first: kubectl get configmap ",
        ),
        (
            "AlertmanagerConfig",
            "this is a Kubernetes manifest (AlertmanagerConfig), not an Alertmanager configuration",
        ),
    ],
)
def test_a_manifest_is_refused_with_the_command_that_takes_the_file_out_of_it(
    kind: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(settings.BadSettings) as refused:
        load(f"apiVersion: v1\nkind: {kind}\ndata: {{}}\n", tmp_path)
    (text,) = refused.value.problems
    assert text.startswith(f"{tmp_path}/alertmanager.yml: {problem}")


def test_rules_and_routes_that_would_mean_something_else_here_are_left_out(
    tmp_path: Path,
) -> None:
    critical, warning = "[severity=critical]", "[severity=warning]"
    rules = [
        f"{{source_matchers: {critical}, target_matchers: {warning}, equal: [cluster, instance]}}",
        f"{{source_matchers: [alertname=Watchdog], target_matchers: {warning}}}",
        f"{{source_matchers: {critical}, target_matchers: {warning}, equal: [node, cluster]}}",
    ]
    text = FILE.replace("group_by: [alertname, cluster]", "group_by: [alertname]").replace(
        "matchers: ['severity=\"critical\"'", "matchers: ['env!=\"dev\"', 'severity=\"critical\"'"
    )
    head, _, tail = text.partition("inhibit_rules:")
    text = head + f"inhibit_rules: [{', '.join(rules)}]\ntime_intervals:"
    text += tail.partition("time_intervals:")[2]
    imported, left_out = load(text, tmp_path)
    assert [(rule.source_matchers, rule.equal) for rule in imported.inhibit_rules] == [
        (("severity=critical",), ("node",))
    ]
    assert sorted(line for line in left_out if line.startswith(("inhibit", "route"))) == [
        (
            "inhibit_rules.0: not imported, because no muster alert has cluster, instance: it"
            " would apply to all alerts"
        ),
        (
            'inhibit_rules.1.source_matchers: alertname="Watchdog" is not imported: no'
            " alertname is called Watchdog"
        ),
        "inhibit_rules.1: not imported, because no muster alert matches it, or every alert does",
        "inhibit_rules.2.equal: no muster alert has cluster; left out",
        (
            'route.routes.0.matchers: env!="dev" is left out, as it always matches: no alert has a'
            " label env"
        ),
    ]
    assert imported.routes[0].matchers == ('severity="critical"', 'node=~"gpu-.*"')


def test_times_and_ranges_may_stand_without_quotes(tmp_path: Path) -> None:
    text = FILE.replace("'09:00'", "08:00").replace("'17:00'", "18:00")
    text = text.replace("years: [2026]", "months: [1:12]")
    (times,) = load(text, tmp_path)[0].time_intervals[0].time_intervals
    assert times.interval() == muting.interval(
        times=[("08:00", "18:00")],
        weekdays=["monday:friday"],
        months=["1:12"],
        location="Europe/Berlin",
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1", "not an Alertmanager configuration: route or receivers is missing"),
        ("[]", "the file: expected a mapping"),
        (
            "{route: {receiver: b}, receivers: [{name: a}]}",
            "route.receiver: no receiver is called b",
        ),
        (
            "{route: {receiver: a, group_wait: soon}, receivers: [{name: a}]}",
            "route.group_wait: 'soon' is not a duration such as 5m",
        ),
    ],
)
def test_what_is_no_configuration_of_alertmanagers_is_refused(
    text: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(settings.BadSettings) as refused:
        load(text, tmp_path)
    assert refused.value.problems == [f"{tmp_path}{os.sep}alertmanager.yml: {problem}"]
