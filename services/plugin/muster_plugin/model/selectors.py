"""Pure: selectors of GPUs and MIG devices, by index, uuid or product.

`0`, `"0"`, `"0:1"`, `GPU-<uuid>`, `MIG-<uuid>` and `MIG-GPU-<uuid>/<gi>/<ci>` are those of NVIDIA's
plugin (api/config/v1/replicas.go, v0.20). A selector of a GPU selects all its MIG devices too.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias, assert_never

import msgspec

from muster_plugin.model import errors, gpu

ANY: Final = "*"
INDEX_MAX: Final = 1023

_UUID: Final = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_INDEX = re.compile(r"([0-9]{1,4})(?::([0-9]{1,4}))?")
_WHOLE = re.compile(rf"(?:GPU|MIG)-{_UUID}", re.IGNORECASE)
_INSTANCE = re.compile(rf"MIG-(GPU-{_UUID})/([0-9]{{1,4}})/([0-9]{{1,4}})", re.IGNORECASE)
_LOOKS_LIKE_ONE = re.compile(r"[-+.:0-9]*|(?:GPU|MIG)-.*", re.IGNORECASE | re.DOTALL)
_FORMS: Final = '0, "0:1", GPU-<uuid>, MIG-<uuid> or MIG-GPU-<uuid>/<gi>/<ci>'


class Index(msgspec.Struct, frozen=True):
    """The n-th GPU, or its n-th MIG device."""

    gpu: int
    mig: int | None = None


class Uuid(msgspec.Struct, frozen=True):
    """A GPU or MIG device by its uuid, in lower case."""

    uuid: str


class Instance(msgspec.Struct, frozen=True):
    """A MIG device by its instances and its GPU's uuid, in lower case."""

    gpu: str
    gi: int
    ci: int


class Product(msgspec.Struct, frozen=True):
    """Every GPU whose product matches."""

    pattern: str


Selector: TypeAlias = Index | Uuid | Instance | Product


def parse(given: int | str, *, products: bool = False) -> Selector:
    """Parse a selector; product selectors are valid only with `products`.

    Raises ValueError, with a text that names the value and what it could be.
    """
    text = str(given)
    if match := _INDEX.fullmatch(text):
        index = Index(int(match[1]), int(match[2]) if match[2] else None)
        if max(index.gpu, index.mig or 0) > INDEX_MAX:
            raise ValueError(f"{errors.quoted(given)}: an index is at most {INDEX_MAX}")
        return index
    if _WHOLE.fullmatch(text):
        return Uuid(text.lower())
    if match := _INSTANCE.fullmatch(text):
        return Instance(match[1].lower(), int(match[2]), int(match[3]))
    if not products or _LOOKS_LIKE_ONE.fullmatch(text):
        product = ", or the name of a product with * for anything" if products else ""
        raise ValueError(f"{errors.quoted(given)} does not name a device; write {_FORMS}{product}")
    return Product(text)


def problems(texts: Iterable[int | str], *, products: bool = False) -> Iterator[str]:
    """Yield the problems of a list of selectors: invalid ones, and overlaps."""
    selectors: dict[int, Selector] = {}
    for at, text in enumerate(texts):
        try:
            selector = parse(text, products=products)
        except ValueError as error:
            yield f"[{at}]: {error}"
            continue
        for before, other in selectors.items():
            if includes(other, selector) or includes(selector, other):
                yield f"[{at}]: {errors.quoted(text)} is named by [{before}] already"
                break
        selectors[at] = selector


def includes(wide: Selector, narrow: Selector) -> bool:
    """Return whether `wide` surely selects everything that `narrow` does."""
    match wide, narrow:
        case Index(gpu=number, mig=None), Index():
            return narrow.gpu == number
        case Uuid(uuid=uuid), Instance():
            return narrow.gpu == uuid
        case Product(pattern=pattern), Product():
            return matches(pattern, narrow.pattern)
        case _:
            return wide == narrow


def selects(reference: Selector, device: gpu.Device, product: str) -> bool:
    """Return whether the selector selects a device, of a GPU of this product."""
    match reference:
        case Index(gpu=number, mig=None):
            return device.index.partition(":")[0] == str(number)
        case Index(gpu=number, mig=within):
            return device.index == f"{number}:{within}"
        case Uuid(uuid=uuid):
            return uuid in {device.uuid.lower(), device.part.gpu.lower()}
        case Instance(gpu=uuid, gi=gi, ci=ci):
            part = device.part
            return (part.gpu.lower(), part.gi, part.ci) == (uuid, gi, ci)
        case Product(pattern=pattern):
            return matches(pattern, product)
        case _ as never:
            assert_never(never)


def matches(pattern: str, text: str) -> bool:
    """Return whether the whole text matches; `*` matches anything, nothing else is special.

    Takes time linear in the text for each `*`. The text may be a pattern itself: what matches it
    matches everything that it does.
    """
    first, *inner = pattern.split(ANY)
    if not inner:
        return text == pattern
    last = inner.pop()
    if not text.startswith(first) or len(text) < len(first) + len(last):
        return False
    end = len(text) - len(last)
    at = len(first)
    for literal in inner:
        at = text.find(literal, at, end)
        if at < 0:
            return False
        at += len(literal)
    return text.endswith(last)
