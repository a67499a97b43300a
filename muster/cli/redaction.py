"""Pure: removes secrets from texts and trees that leave the operator's machine.

It removes known secrets, and texts that look like secrets. After a key such as `password`, it
removes the value, up to the end of the line if the value is not quoted. In an address, it removes
the credentials, the path and the subdomains of hosts outside the cluster: the paths of webhooks are
secret. If muster does not use the scheme of an address, it removes everything after the scheme,
because Apprise puts tokens there. Tokens and keys are recognised by their format. In case of doubt,
a text is removed.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Final

import muster

REMOVED: Final = "(removed)"

_KNOWN_MIN: Final = 6
"""The minimum length of a known secret; a shorter value occurs in many texts by chance."""
_WORDS: Final = (
    r"pass(?!ed\b|es\b|ing\b)(?:word|wd|phrase)?|pwd|secret|token|credential|authorization|api[-_]?key|access[-_]?key|"
    r"routing[-_]?key|service[-_]?key|integration[-_]?key|private|seed|nkey|jwt|cookie|signature|"
    r"creds"
)
_KEY: Final = re.compile(rf"{_WORDS}|headers", re.IGNORECASE)
_REFERENCES: Final = frozenset({"env", "file", "at"})
"""The keys of references to secrets; the values of these keys are not secret."""
# each pattern scans a character run once, because log lines may have thousands of characters
_NAME: Final = rf"(?<![\w.-])(?=[\w.-]*?(?:{_WORDS}))[\w.-]+"
_QUOTED: Final = r"""\\".*?(?<!\\)\\"|"(?:[^"\\\n]|\\.)*"|'(?:[^'\n]|'')*'"""
_JSON_SCALAR: Final = r"""(?:(?<=":)|(?<=":\s))(?:-?\d[\d.e+-]*|true|false|null)(?=\s*[,}\]])"""
_UNQUOTED: Final = r"""[^\s](?:(?!(?<!\\)"\s*[,}\]])[^\n])*"""
"""Matches the rest of the line, or of the JSON string, even if it has several words."""
_PAIR: Final = re.compile(
    rf"""(?P<key>{_NAME}\\?["']?\s*(?::|=>?)\s*)(?:{_QUOTED}|{_JSON_SCALAR}|{_UNQUOTED})""",
    re.IGNORECASE,
)
_OPTION: Final = re.compile(rf"((?<!\S)(?=--){_NAME}\s+)(?:{_QUOTED}|\S+)", re.IGNORECASE)
_SCHEME: Final = re.compile(r"\b(bearer|basic)\s+[^\s\"',;]+", re.IGNORECASE)
_HEADER: Final = re.compile(
    r"((?:authorization|cookie)\\?[\"']?\s*:\s*\\?[\"']?)[^\"'\\\n]+", re.IGNORECASE
)
_URL: Final = re.compile(
    r"(?<![a-z0-9+.-])(?P<scheme>[a-z0-9+.-]+)://(?P<rest>[^\s\"'<>`\\]*)", re.IGNORECASE
)
_FORMATS: Final = (
    re.compile(r"-----BEGIN [^-\n]+-----.*?(?:-----END [^-\n]+-----|\Z)", re.DOTALL),
    # a JWT; the seed of an nkey; tokens of Slack, GitLab, NVIDIA, GitHub and Telegram
    re.compile(r"eyJ[\w-]{8,}(?:\.[\w-]*){0,2}"),
    re.compile(r"S[UAONCXP][A-Z2-7]{56}"),
    re.compile(r"(?:xox[a-z]|xapp|glpat|nvapi)-[\w-]+|gh[a-z]_\w{20,}"),
    re.compile(r"(?<!\d)\d{6,12}:[\w-]{30,}"),
)
_SCHEMES: Final = frozenset({"http", "https", "nats", "tls", "ws", "wss"})
"""The schemes that muster itself uses; of addresses with other schemes, only the scheme is kept."""
_HOST: Final = re.compile(r"[\w.-]+(?::\d{1,5})?|\[[\da-f:]+\](?::\d{1,5})?", re.IGNORECASE)
_IN_CLUSTER: Final = re.compile(r"[\d.]+|[^.]+|.*\.svc(?:\..*)?")
"""Matches hosts that are kept: IPv4 addresses, names without dots, Kubernetes Services."""
_PATHS: Final = frozenset({"", "state", "metrics", "readyz", "healthz"})
"""The paths of muster's own pages, which are kept."""


class Redaction:
    """Removes secrets; `known` are secret values of any format."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        values = {value.strip() for value in known}
        whole = {value for value in values if len(value) >= _KNOWN_MIN}
        lines = {line for value in whole for line in value.split("\n") if len(line) >= _KNOWN_MIN}
        written = {form for value in whole | lines for form in _forms(value)}
        self._known = sorted(written, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        for value in self._known:
            text = text.replace(value, REMOVED)
        for pattern in _FORMATS:
            text = pattern.sub(REMOVED, text)
        text = _URL.sub(_address, text)
        text = _SCHEME.sub(rf"\1 {REMOVED}", text)
        text = _HEADER.sub(rf"\1{REMOVED}", text)
        text = _OPTION.sub(rf"\1{REMOVED}", text)
        return _PAIR.sub(rf"\g<key>{REMOVED}", text)

    def tree(self, tree: object) -> object:
        """Return a JSON or YAML tree without secrets in its keys and values."""
        return self._tree(tree, is_secret=False)

    def _tree(self, tree: object, *, is_secret: bool) -> object:
        match tree:
            case Mapping():
                return {
                    self.text(str(key)): self._tree(
                        value,
                        is_secret=bool(_KEY.search(str(key)))
                        or (is_secret and str(key) not in _REFERENCES),
                    )
                    for key, value in tree.items()
                }
            case list() | tuple():
                return [self._tree(item, is_secret=is_secret) for item in tree]
            case None | bool():
                return tree
            case _ if is_secret:
                return REMOVED
            case int() | float():
                return tree
            case _:
                return self.text(str(tree))


def _forms(value: str) -> Iterable[str]:
    """Yield a value unchanged, percent-encoded as in addresses, and in base64 as in Secrets."""
    encoded = value.encode("utf-8", "surrogatepass")
    quoted = re.sub(rb"[^\w.~-]", lambda match: b"%%%02X" % match[0][0], encoded)
    yield from (value, quoted.decode(), base64.b64encode(encoded).decode())


def _address(match: re.Match[str]) -> str:
    """Return an address without credentials, secret hosts, and paths that are not muster's."""
    if match[0].startswith(muster.RUNBOOKS_URL):
        return match[0]
    scheme = match["scheme"]
    if scheme.lower() not in _SCHEMES:
        return f"{scheme}://{REMOVED}"
    # a password may contain any character, so the host follows the last @
    host, *more = re.split(r"[/?#]", match["rest"].rpartition("@")[2], maxsplit=1)
    where = _place(host) if _HOST.fullmatch(host) else REMOVED
    path = "".join(more)
    return f"{scheme}://{where}" + (f"/{path if path in _PATHS else REMOVED}" if more else "")


def _place(host: str) -> str:
    """Return an address or a name in the cluster unchanged; keep two parts of any other name."""
    name = host.partition(":")[0]
    if host.startswith("[") or _IN_CLUSTER.fullmatch(name):
        return host
    *more, domain, top = host.split(".")
    return f"{REMOVED}.{domain}.{top}" if more else host
