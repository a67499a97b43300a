"""Reports that leave the operator's machine contain no secrets."""

import base64
import urllib.parse
from typing import Final

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import muster
from muster.cli import redaction
from muster.cli.redaction import REMOVED

BLIND: Final = redaction.Redaction()
SECRETS: Final = st.text("abcdefghijkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789_-", min_size=12)
PLACES: Final = (
    "nats://admin:{}@muster-nats:4222",
    "connecting to nats://admin:{}@a:4222,nats://admin:{}@b:4222 failed",
    "tls://{}@a:4222",
    "POST https://hooks.slack.com/services/T0/B0/{} answered 404",
    "https://example.com/?token={}&a=b",
    "https://example.com/#{}",
    "https://user:{}@example.com/x",
    "password={}",
    "PASSWORD: '{}'",
    'the body was {{"routing_key": "{}"}}',
    'a string of JSON: "{{\\"api_key\\":\\"{}\\"}}"',
    "Authorization: Bearer {}",
    "authorization: Basic {}",
    "curl -H 'X-Api-Key: {}'",
    "MUSTER_BOT_TOKEN={} muster",
    "xoxb-1-{}",
    "eyJhbGciOiJIUzI1NiJ9.{}.{}",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    "-----BEGIN NATS USER JWT-----\n{}\n",
    '{{"password": "a\\"{}"}}',
    'a string of JSON: "{{\\"password\\":\\"a \\\\\\"{}\\"}}"',
    "password: 'it''s {}'",
    "password => {}",
    "pwd={}",
    "Authorization: GenieKey {}",
    "Proxy-Authorization: Digest a=b, response={}",
    "Cookie: a=b; c={}",
    "muster --bot-token {}",
    "glpat-{}",
    "xapp-1-{}",
    "tgram://{}/123456",
    "TGRAM://bot{}/",
    "tgram://123456789:{}/-1001?format=html",
    "slack://{}/{}/{}/#ops",
    "discord://123/{}",
    "mailto://user:{}@example.com",
    "pover://user@{}",
    "my_tgram://{}/1",
    "https://{}.webhook.office.com/webhookb2/a@b/IncomingWebhook/c/d",
    "https://a.webhook.office.com/webhookb2/{}@b/IncomingWebhook/{}/d",
    "POST https://{}.m.example.net answered 404",
    "muster --password 'a b {}' --x",
    'muster --password "{} b"',
)
KEYS: Final = (
    *("password", "Password", "bot_token", "api-key", "client_secret", "routingKey", "headers"),
    *("credentials", "authorization", "NATS_SEED", "private_key", "cookie"),
)


@given(secret=SECRETS, place=st.sampled_from(PLACES), before=st.text(), after=st.text())
def test_a_text_has_no_secret_where_secrets_are_written(
    secret: str, place: str, before: str, after: str
) -> None:
    assume(secret not in before + after)
    text = f"{before}{place.replace('{}', secret).replace('{{', '{').replace('}}', '}')} {after}"
    assert secret not in BLIND.text(text)


@given(
    words=st.lists(SECRETS.filter(lambda word: word[0] != "-"), min_size=2, max_size=5),
    by=st.sampled_from([" ", "  ", ", ", "; ", " & ", "' ", "} ", '" ']),
    key=st.sampled_from(["password: ", "PASSWORD=", "the passphrase = ", "pwd => "]),
    after=st.sampled_from(["", "\nnode-a is well"]),
)
def test_a_secret_of_several_words_is_removed_as_a_whole(
    words: list[str], by: str, key: str, after: str
) -> None:
    clean = BLIND.text(f"login failed, {key}{by.join(words)}{after}")
    assert [word for word in words if word in clean] == []
    assert clean.startswith("login failed, ")
    assert clean.endswith(after)


def test_what_follows_a_secret_in_a_line_of_json_stays() -> None:
    line = (
        '{"event":"x","error":"the password: a b, c","token_s": 5.0,"secret":null,"node":"node-a"}'
    )
    assert BLIND.text(line) == (
        f'{{"event":"x","error":"the password: {REMOVED}","token_s": {REMOVED},'
        f'"secret":{REMOVED},"node":"node-a"}}'
    )


@given(secret=SECRETS, key=st.sampled_from(KEYS), wrapped=st.integers(0, 3))
def test_a_tree_has_no_secret_below_a_key_that_names_one(
    secret: str, key: str, wrapped: int
) -> None:
    tree: object = {
        key: secret,
        "one": {key: [secret, {"deep": secret}]},
        "two": {key: {"x": secret}},
    }
    for _ in range(wrapped):
        tree = [{"level": tree}]
    assert secret not in repr(BLIND.tree(tree))


@given(secret=st.text(min_size=12).filter(lambda text: text == text.strip()), text=st.text())
def test_what_is_known_to_be_secret_is_removed_in_every_form(secret: str, text: str) -> None:
    knowing = redaction.Redaction([f"{secret}\n"])
    encoded = base64.b64encode(secret.encode()).decode()
    quoted = urllib.parse.quote(secret, safe="")
    clean = knowing.text(f"{text}{secret}{text} {encoded} {quoted}")
    assert quoted not in clean
    assert secret not in clean
    assert encoded not in clean
    assert secret not in repr(knowing.tree({"any": [text + secret], secret: 1}))


@pytest.mark.parametrize("run", ["a", "pass", "eyJ", "a+", "password-", "eyJaaaaaaaa.", "a://"])
def test_a_long_run_of_characters_is_looked_at_once(run: str) -> None:
    # one such line in a log once kept the command busy for hours
    before = run * (60_000 // len(run))
    assert "abcdef" not in BLIND.text(f"{before} password=abcdef")


@pytest.mark.parametrize(
    "text",
    [
        "bus_disconnected url=nats://muster-nats:4222 error=connection refused",
        "GET http://10.0.0.1:8080/state",
        "2026-01-02T03:04:05Z node-a nvidia.com/gpu 8 devices",
        f"see {muster.RUNBOOKS_URL}plugin_down.html",
        "Secret muster-nats-admin",
        "passed: a pod got smarter-devices/fuse",
        "nats://[::1]:4222",
        "nats://muster-nats-0.muster-nats.muster.svc.cluster.local:4222",
        "tls://muster-nats.muster.svc:4222",
        "https://example.com",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert BLIND.text(text) == text


def test_settings_keep_where_a_secret_is_and_lose_the_secret_itself() -> None:
    settings = {
        "bus": {"url": "nats://notifier:abcdef@muster-nats:4222"},
        "receivers": [
            {"name": "ops", "slack": {"token": {"env": "SLACK_TOKEN"}, "channel": "#ops"}},
            {"name": "old", "pagerduty": {"routing_key": 12345678, "url": "https://a.b/c/d"}},
            {"name": "file", "webhook": {"secret": {"file": "/etc/x", "at": "a.0"}}},
        ],
        "headers": {"X-Anything": "abcdef"},
        "enabled": True,
        "interval_s": 5.0,
    }
    assert BLIND.tree(settings) == {
        "bus": {"url": "nats://muster-nats:4222"},
        "receivers": [
            {"name": "ops", "slack": {"token": {"env": "SLACK_TOKEN"}, "channel": "#ops"}},
            {
                "name": "old",
                "pagerduty": {"routing_key": REMOVED, "url": f"https://a.b/{REMOVED}"},
            },
            {"name": "file", "webhook": {"secret": {"file": "/etc/x", "at": "a.0"}}},
        ],
        "headers": {"X-Anything": REMOVED},
        "enabled": True,
        "interval_s": 5.0,
    }
