"""Credentials from the environment: read again for each connection, reported without secrets."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from muster.cli import keyfiles
from muster.nats import credentials
from muster.nats.auth import accounts
from tests.worlds import token_issuer

URL = "tls://127.0.0.1:4222"


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "token"
    monkeypatch.setenv("NATS_TOKEN_FILE", str(file))
    return file


def of(node: str) -> str:
    return token_issuer.token(token_issuer.claims(node, at=time.time()), "e1", "ES256")


def test_a_token_is_read_again_for_each_connection_and_names_our_inboxes(token: Path) -> None:
    first, second = of("node-a.example"), of("node-a.example")
    token.write_text(f"{first}\n")
    options = credentials.options(URL)
    assert options["inbox_prefix"] == "_INBOX.plugin_node-a_example"
    assert options["token"]() == first
    token.write_text(second)
    assert options["token"]() == second


def test_an_unknown_token_has_the_default_inboxes(token: Path) -> None:
    token.write_text("s3cret")
    assert credentials.options(URL)["inbox_prefix"] == "_INBOX"


@pytest.mark.parametrize("text", ["", "two words", "ä", "x" * 4000])
def test_an_invalid_token_is_reported_and_not_repeated(token: Path, text: str) -> None:
    token.write_text(text)
    with pytest.raises(credentials.Unusable) as error:
        credentials.options(URL)
    assert str(error.value) == f"{token}: expected a token of 1 to 3,500 characters"


def test_credentials_are_read_again_and_win_over_a_user_in_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyfiles.make(tmp_path, at=1)
    file = tmp_path / "mine"
    monkeypatch.setenv("NATS_CREDS", str(file))
    texts = [
        keyfiles.user(tmp_path, accounts.Role.READER, name="reader_x", at=at) for at in (1.0, 2.0)
    ]
    file.write_text(texts[0])
    options = credentials.options("nats://somebody:else@127.0.0.1:4222")
    assert options["inbox_prefix"] == "_INBOX.reader_x"
    inboxes = []
    for text in texts:
        file.write_text(text)
        inboxes.append(options["user_jwt_cb"]().decode())
        assert inboxes[-1] in text
        assert len(options["signature_cb"]("nonce")) == 86
    assert len(set(inboxes)) == 2
    file.write_text("nothing")
    missing = r"mine: no valid credentials, because the token is missing$"
    with pytest.raises(credentials.Unusable, match=missing):
        options["user_jwt_cb"]()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        credentials.options(URL)


def test_an_address_with_a_user_is_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert credentials.options("nats://plugin_a:p@h:1")["inbox_prefix"] == "_INBOX.plugin_a"
    assert credentials.options("nats://h:1") == {"inbox_prefix": "_INBOX"}
    monkeypatch.setenv("NATS_INBOX_PREFIX", "_mine")
    assert credentials.options("nats://a:b@h:1")["inbox_prefix"] == "_mine"


def test_credentials_and_authority_may_be_content_which_no_error_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyfiles.make(tmp_path, at=1)
    at, lasts = datetime.now(UTC), timedelta(days=1)
    keyfiles.make_certificates(tmp_path, ["muster-nats"], at=at, lasts=lasts)
    text = keyfiles.user(tmp_path, accounts.Role.READER, name="reader_x", at=1.0)
    monkeypatch.setenv("NATS_CREDS", text)
    monkeypatch.setenv("NATS_CA", (tmp_path / "ca.crt").read_text("utf-8"))
    monkeypatch.setenv("NATS_SERVER_NAME", "muster-nats")
    options = credentials.options(URL)
    assert (options["inbox_prefix"], options["tls_hostname"]) == ("_INBOX.reader_x", "muster-nats")
    assert options["user_jwt_cb"]().decode() in text
    assert len(options["tls"].get_ca_certs()) == 1
    half = text[: len(text) // 4]
    monkeypatch.setenv("NATS_CREDS", half)
    with pytest.raises(credentials.Unusable) as refused:
        credentials.options(URL)
    assert str(refused.value).startswith("NATS_CREDS: ")
    assert half[-20:] not in str(refused.value)
