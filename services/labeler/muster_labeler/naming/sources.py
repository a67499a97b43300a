"""Pure: identifies a node's GPUs from several sources, in order of trust.

If sources disagree, the node gets a finding and no label, because it is unknown which source is
wrong.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from muster.kubernetes import scheduling
from muster_labeler import model
from muster_labeler.naming import accelerators
from muster_labeler.naming.accelerators import Name, Reason


class Source(enum.StrEnum):
    """The sources of a node's accelerator name, most trusted first."""

    AGENT = "agent inventory"
    DRA = "DRA ResourceSlice"
    GFD = "GPU feature discovery"
    CLOUD = "cloud label"
    INSTANCE_TYPE = "instance type"


class Product(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """One kind of GPU, as a node's agent or DRA reports it."""

    name: str
    memory_mib: int | None = None
    is_mig: bool = False
    is_vgpu: bool = False


Kinds = Mapping[Product, int]
"""How many GPUs there are of each kind."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The accelerator name from one source, and the text that it was derived from.

    `product` is the text for which an alias can be given; empty if the source does not report a
    single product.
    """

    source: Source
    text: str
    name: Name
    memory_mib: int | None = None
    product: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """The claims of all sources about a node's accelerators; `best` is the claim that counts."""

    claims: tuple[Claim, ...] = ()
    best: Claim | None = None
    is_conflict: bool = False
    readings: tuple[accelerators.Reading, ...] = ()

    @property
    def name(self) -> Name:
        """Return the name from the best source, certain or not."""
        return self.best.name if self.best else Name(None, Reason.NO_NAME)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The reports of plugins and DRA about GPUs, by node, and the reviewed `aliases`.

    `may_use_instance_type` means that a name from the instance type may be written.
    """

    agents: Mapping[str, Kinds]
    slices: Mapping[str, Kinds]
    aliases: Mapping[str, str]
    may_use_instance_type: bool = False


NO_GPU: Final = "no GPU"
NO_EVIDENCE: Final = Evidence({}, {}, {})

_INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
_PRODUCTS_SHOWN_MAX: Final = 5
_COUNTS: Final = re.compile(r"(?:^|(?<=, ))\d+ x ")
_WRITTEN_SCHEMES: Final = frozenset({"skypilot", "muster"})
"""Schemes that people and muster write: their labels are checked, but are not evidence."""
_INSTANCE_TYPES: Final = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"p2\..+", "k80"),
        (r"p3dn\..+", "v100-32gb"),
        (r"p3\..+", "v100"),
        (r"p4d\..+", "a100"),
        (r"p4de\..+", "a100-80gb"),
        (r"p5\..+", "h100"),
        (r"p5en?\..+", "h200"),
        (r"p6-b200\..+", "b200"),
        (r"p6-b300\..+", "b300"),
        (r"g3s?\..+", "m60"),
        (r"g4dn\..+", "t4"),
        (r"g5\..+", "a10g"),
        (r"g5g\..+", "t4g"),
        (r"g6\..+|gr6\..+", "l4"),
        (r"g6e\..+", "l40s"),
        (r"standard_nc\d+as_t4_v3", "t4"),
        (r"standard_nc\d+s_v3|standard_nd40s?_v2", "v100"),
        (r"standard_nd40rs_v2", "v100-32gb"),
        (r"standard_nc\d+ads_a100_v4|standard_nd96amsr_a100_v4", "a100-80gb"),
        (r"standard_nd96asr_v4", "a100"),
        (r"standard_nc\d+adi?s_h100_v5", "h100-nvl"),
        (r"standard_nd96isr_h100_v5", "h100"),
        (r"standard_nd96isr_h200_v5", "h200"),
        (r"standard_nd96isr_mi300x_v5", "mi300x"),
        (r"a2-highgpu-.+|a2-megagpu-.+", "a100"),
        (r"a2-ultragpu-.+", "a100-80gb"),
        (r"a3-(high|edge)gpu-.+", "h100"),
        (r"a3-megagpu-.+", "h100-mega"),
        (r"a3-ultragpu-.+", "h200"),
        (r"a4-highgpu-.+", "b200"),
        (r"g2-standard-.+", "l4"),
        (r"bm\.gpu\.h100\..+", "h100"),
        (r"bm\.gpu\.h200\..+", "h200"),
        (r"bm\.gpu\.b200\..+", "b200"),
        (r"bm\.gpu4\..+", "a100"),
        (r"bm\.gpu\.a100-v2\..+", "a100-80gb"),
        (r"bm\.gpu\.l40s.*", "l40s"),
        (r"(bm|vm)\.gpu\.a10\..+", "a10"),
        (r"bm\.gpu\.mi300x\..+", "mi300x"),
        (r"gpu-(h100|h200|b200|b300|l40s)-.+", ""),
    )
)
"""The accelerator name for each pattern of instance types; "" means the pattern's first group.

A name is only a hint, and is used for a label only on request: the type shows which GPUs were
ordered, not which GPUs the node has.
"""


def identify(node: model.Node, evidence: Evidence = NO_EVIDENCE) -> Identity:
    """Return the claims of all sources about a node, with the deciding claim."""
    readings = tuple(accelerators.read_labels(node.labels))
    claims = tuple(_claims(node, readings, evidence))
    conclusive = [claim for claim in claims if _is_conclusive(claim)]
    if not conclusive:
        return Identity(claims, next(iter(claims), None), is_conflict=False, readings=readings)
    observed = [claim for claim in conclusive if claim.source is not Source.INSTANCE_TYPE]
    is_conflict = any(_contradict(observed[0].name, claim.name) for claim in observed[1:])
    best = observed[0] if observed else conclusive[0]
    return Identity(claims, best, is_conflict=is_conflict, readings=readings)


def describe(products: Kinds) -> str:
    """Return the products as text; equal products always produce equal text."""
    texts = sorted(
        f"{count} x {product.name[:100].strip() or 'nameless'}"
        + (f" ({product.memory_mib} MiB)" if product.memory_mib is not None else "")
        + (" partitioned" if product.is_mig else "")
        + (" virtual" if product.is_vgpu else "")
        for product, count in products.items()
    )
    more = len(texts) - _PRODUCTS_SHOWN_MAX
    return ", ".join(texts[:_PRODUCTS_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")


def without_counts(text: str) -> str:
    """Return a text that `describe` wrote without its counts."""
    return _COUNTS.sub("", text)


def _claims(
    node: model.Node, readings: Iterable[accelerators.Reading], evidence: Evidence
) -> Iterable[Claim]:
    if node.name in evidence.agents:
        yield _claim(Source.AGENT, evidence.agents[node.name], evidence.aliases)
    if node.name in evidence.slices:
        yield _claim(Source.DRA, evidence.slices[node.name], evidence.aliases)
    labels = [
        reading
        for reading in readings
        # muster's own label is not independent evidence
        if reading.fault is None
        and reading.scheme.id not in _WRITTEN_SCHEMES
        and not node.is_ours_alone(reading.scheme.key)
    ]
    for reading in sorted(labels, key=lambda reading: reading.scheme.id != "gfd"):
        is_gfd = reading.scheme.id == "gfd"
        memory = _memory(node, reading)
        name = reading.name
        if is_gfd and name.reason is Reason.FALLBACK:
            name = accelerators.name(reading.value, memory, aliases=evidence.aliases)
        if node.has_partitions or node.is_virtual:
            # labels name the whole card
            name = Name(None, Reason.MIG if node.has_partitions else Reason.VGPU)
        source = Source.GFD if is_gfd else Source.CLOUD
        text = f"{reading.scheme.key}={reading.value}"
        yield Claim(source, text, name, memory, reading.value if is_gfd else "")
    instance_type = node.labels.get(_INSTANCE_TYPE, "")
    hint = _instance_type_hint(instance_type)
    is_whole = not (node.has_partitions or node.is_virtual)
    if hint is not None and node.may_have_accelerators and is_whole:
        reason = Reason.EXACT if evidence.may_use_instance_type else Reason.FALLBACK
        yield Claim(Source.INSTANCE_TYPE, f"{_INSTANCE_TYPE}={instance_type}", Name(hint, reason))


def _instance_type_hint(instance_type: str) -> str | None:
    text = instance_type.lower()
    matches = ((pattern.fullmatch(text), name) for pattern, name in _INSTANCE_TYPES)
    return next((name or match[1] for match, name in matches if match), None)


def _claim(source: Source, products: Kinds, aliases: Mapping[str, str]) -> Claim:
    names = [
        accelerators.name(
            product.name,
            product.memory_mib,
            is_mig=product.is_mig,
            is_vgpu=product.is_vgpu,
            aliases=aliases,
        )
        for product in products
    ]
    text = describe(products) or NO_GPU
    memory = {product.memory_mib for product in products}
    called = {product.name for product in products}
    return Claim(
        source,
        text,
        accelerators.of_node(names),
        memory.pop() if len(memory) == 1 else None,
        called.pop() if len(called) == 1 else "",
    )


def _memory(node: model.Node, reading: accelerators.Reading) -> int | None:
    written = node.labels.get(reading.scheme.memory_key, "")
    amount = scheduling.quantity_count(written) if reading.scheme.memory_key else 0
    return amount * reading.scheme.memory_unit_mib or None


def _is_conclusive(claim: Claim) -> bool:
    """Return whether a claim determines the name, or rules out any name."""
    return claim.name.value is not None or claim.name.reason in {
        Reason.MIG,
        Reason.VGPU,
        Reason.MIXED,
    }


def _contradict(name: Name, other: Name) -> bool:
    """Return whether two claims contradict; `a100` of unknown memory agrees with `a100-80gb`."""
    if name.value is None or other.value is None or Reason.FALLBACK in {name.reason, other.reason}:
        # a cloud names the card, an agent knows that it is partitioned
        return False
    if {name.value, other.value} == {"h100", "h100-nvl"}:
        # SkyPilot also serves requests for the plain card with this name
        return False
    if name.reason is Reason.MEMORY_UNKNOWN and other.value.startswith(name.value):
        return False
    if other.reason is Reason.MEMORY_UNKNOWN and name.value.startswith(other.value):
        return False
    return name.value != other.value
