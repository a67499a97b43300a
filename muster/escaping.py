"""Pure: replaces or escapes the characters of a text that control a terminal or mislead readers.

Unprintable characters are control characters (C0, DEL and C1), line separators, lone surrogates,
and invisible format characters such as those that reverse the direction of a text. Everything that
a command prints or a service logs passes through here, because names and texts come from plugins,
drivers and files.
"""

import contextlib
import json
import re
from typing import Final

import msgspec

_REPLACED: Final = "\N{REPLACEMENT CHARACTER}"
_MAYBE: Final = re.compile(r"[^ -~]")
"""Matches every character that may be unprintable; most texts contain none."""
_16_BITS: Final = 0xFFFF


def plain(text: str, *, keep: str = "") -> str:
    """Return the text with U+FFFD for each unprintable character, except those in `keep`."""

    def replaced(match: re.Match[str]) -> str:
        return match[0] if match[0].isprintable() or match[0] in keep else _REPLACED

    return _MAYBE.sub(replaced, text)


def json_text(encoded: bytes) -> str:
    r"""Return equivalent JSON, with `\u` escapes for unprintable characters."""

    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        # outside strings, the line feed is the only unprintable character in JSON
        if character.isprintable() or character == "\n":
            return character
        return json.dumps(character)[1:-1]

    return _MAYBE.sub(escaped, encoded.decode("utf-8", "replace"))


def json_of(value: object, *, indent: int = 0) -> str:
    """Return a value as JSON: on one line, or indented."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        # a lone surrogate, for example in the name of a file
        return json.dumps(msgspec.to_builtins(value), indent=indent or None)
    return json_text(msgspec.json.format(encoded, indent=indent) if indent else encoded)


def yaml_of(tree: object) -> str:
    """Return a tree as YAML, or as JSON (which is also YAML) if it has unprintable characters."""
    with contextlib.suppress(UnicodeEncodeError):
        text = msgspec.yaml.encode(tree).decode()
        if plain(text, keep="\n") == text:
            return text

    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        return character if character.isprintable() else f"\\U{ord(character):08x}"

    text = json.dumps(msgspec.to_builtins(tree), ensure_ascii=False, indent=2)
    return "\n".join(_MAYBE.sub(escaped, line) for line in text.split("\n")) + "\n"
