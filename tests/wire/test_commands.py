"""The installed commands: who runs them, and where this muster was installed from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster import commands

PROGRAM = """
import os, sys
from muster import commands
os.setuid(int(sys.argv[1]))
print(commands.user_name())
"""
NAMELESS = "54321"


def test_a_user_without_a_name_is_a_number() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    named = {"LOGNAME", "USER", "LNAME", "USERNAME"}
    environment = {key: value for key, value in os.environ.items() if key not in named}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, NAMELESS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"user {NAMELESS}\n"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            None,
            "pip install '.[cli,auth]' in muster's source tree, or pip install 'FILE.whl",
        ),
        (
            {"url": "file:///nowhere/muster", "dir_info": {}},
            "pip install '.[cli,auth]' in muster's ",
        ),
        ({"url": "file:///{here}/a%20b", "dir_info": {}}, "pip install '{here}/a b[cli,auth]'"),
        (
            {"url": "file:///{here}/a%20b", "dir_info": {"editable": True}},
            "pip install -e '{here}/a b[cli,auth]'",
        ),
        (
            {"url": "https://example.com/muster.whl", "archive_info": {}},
            "pip install 'muster-k8s[cli,auth] @ https://example.com/muster.whl'",
        ),
        (
            {"url": "https://example.com/muster", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "pip install 'muster-k8s[cli,auth] @ git+https://example.com/muster'",
        ),
        ("not JSON", "pip install '.[cli,auth]' in muster's source tree"),
    ],
)
def test_an_extra_is_installed_from_where_muster_came(
    origin: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    information = tmp_path / "muster_k8s-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: muster-k8s\n")
    if origin is not None:
        text = origin if isinstance(origin, str) else json.dumps(origin)
        text = text.replace("/{here}", str(tmp_path))
        (information / "direct_url.json").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    printed = commands.how_to_install("cli", "auth")
    assert printed.startswith(command.replace("{here}", str(tmp_path)))
