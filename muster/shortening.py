"""Pure: splits or visibly shortens an event that is too long for a message.

Plugins' messages are small (`muster.nats.streams`). An event with many pods or much evidence may
exceed the limit, but must not be dropped.
"""

from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from muster import vocabulary

_LIMITS: Final = ((1_000, 50), (300, 20), (300, 5), (100, 1))
"""The limits of texts and of lists, in pairs; the pairs are tried in this order."""
_NAME_MAX: Final = 253
"""The maximum length of a name; names are never cut."""
_MARK: Final = "... (shortened)"
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def fit(event: vocabulary.Event, bytes_max: int) -> tuple[vocabulary.Event, ...]:
    """Return events whose data has at most `bytes_max` bytes of JSON, if possible.

    An allocation of several devices is split into allocations of fewer devices. In any other event,
    long texts and lists are cut and marked as shortened.
    """
    if _size(event) <= bytes_max:
        return (event,)
    if isinstance(event, vocabulary.AllocationObserved) and len(event.device_ids) > 1:
        middle = len(event.device_ids) // 2
        halves = event.device_ids[:middle], event.device_ids[middle:]
        return tuple(
            part
            for ids in halves
            for part in fit(msgspec.structs.replace(event, device_ids=ids), bytes_max)
        )
    shorter = event
    for text_max, items_max in _LIMITS:
        shorter = _shorten_fields(event, text_max, items_max)
        if _size(shorter) <= bytes_max:
            break
    return (shorter,)


def _shorten_fields(struct: _Struct, text_max: int, items_max: int) -> _Struct:
    fields = {name: getattr(struct, name) for name in struct.__struct_fields__}
    changed = {
        name: short
        for name, value in fields.items()
        if (short := _shorten(value, text_max, items_max)) is not value
    }
    return msgspec.structs.replace(struct, **changed) if changed else struct


def _shorten(value: Any, text_max: int, items_max: int) -> Any:
    match value:
        case str() if len(value) > max(text_max, _NAME_MAX):
            return value[: text_max - len(_MARK)] + _MARK
        case vocabulary.Evidence() | vocabulary.FuseMount() | vocabulary.Watched():
            return _shorten_fields(value, text_max, items_max)
        case (str() | vocabulary.Evidence(), *_):
            items = [_shorten(item, text_max, items_max) for item in value[:items_max]]
            return (*items, *_left_out(value[items_max:]))
        case _:
            return value


def _left_out(items: Sequence[str | vocabulary.Evidence]) -> Sequence[str | vocabulary.Evidence]:
    if not items:
        return ()
    text = f"({len(items)} more left out)"
    is_text = isinstance(items[0], str)
    return (text if is_text else vocabulary.Evidence(source="muster", observed=text),)


def _size(event: vocabulary.Event) -> int:
    return len(msgspec.json.encode(event))
