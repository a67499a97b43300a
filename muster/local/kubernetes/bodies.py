"""Adapter: YAML. What a request's body holds, by the media type that its client names."""

import contextlib

import orjson
import yaml

from muster.local.kubernetes import refusals, trees, writes

YAML_BYTES_MAX = 256 * 1024
"""The YAML reader takes seconds for a megabyte, and everybody else would wait."""


def decoded(body: bytes, media_type: str) -> trees.Json:
    """Return the tree that a body is: of an object, or of the options of a DELETE."""
    # aiohttp says octet-stream where the client said nothing; the API server then takes JSON
    if media_type in {"application/json", "application/octet-stream"}:
        return trees.from_json(body)
    if media_type in {"application/yaml", "application/x-yaml"}:
        return _from_yaml(body)
    raise _unsupported(media_type, ["application/json", "application/yaml"])


def patch(body: bytes, media_type: str) -> tuple[trees.Json, writes.PatchFormat]:
    """Return the tree that a patch is, and how it is to be read."""
    try:
        found = writes.PatchFormat(media_type)
    except ValueError as error:
        raise _unsupported(media_type, list(writes.PatchFormat)) from error
    if found is writes.PatchFormat.APPLY:
        return _from_yaml(body), found
    return trees.from_json(body), found


def _from_yaml(body: bytes) -> trees.Json:
    """Return the tree that the YAML (or JSON) text `body` spells, with no types but JSON's."""
    with contextlib.suppress(orjson.JSONDecodeError):
        value: trees.Json = orjson.loads(body)
        trees.refuse_depth(value)
        return value
    if len(body) > YAML_BYTES_MAX:
        raise refusals.bad_request(f"YAML of more than {YAML_BYTES_MAX} bytes; send JSON")
    try:
        loaded: object = yaml.load(body, Loader=_Loader)  # noqa: S506 - a SafeLoader with less
        spelled = orjson.dumps(loaded)
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise refusals.bad_request(f"the body is not YAML for JSON: {error}") from error
    return trees.from_json(spelled)


class _Loader(yaml.SafeLoader):
    """YAML's JSON subset: no aliases (a few lines could stand for gigabytes), no dates."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - yaml reads it from the class
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not accepted")
        return super().compose_node(parent, index)


def _unsupported(media_type: str, known: list[str]) -> refusals.RequestError:
    return refusals.RequestError(
        refusals.Reason.UNSUPPORTED_MEDIA_TYPE,
        f"the body of the request was in an unknown format ({media_type}) - accepted media types "
        f"include: {', '.join(known)}",
    )
