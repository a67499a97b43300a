import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster_labeler.naming import accelerators
from muster_labeler.naming.accelerators import Name, Reason


@pytest.mark.parametrize(
    ("product", "memory_mib", "value", "reason"),
    [
        # memory decides; the measured size has precedence over the product name
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb", Reason.EXACT),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100", Reason.EXACT),
        ("NVIDIA A100-PCIE-40GB", None, "a100", Reason.EXACT),
        ("NVIDIA A100 80GB PCIe", None, "a100-80gb", Reason.EXACT),
        ("A100-SXM-80GB", 40536, "a100", Reason.EXACT),
        ("NVIDIA A100", None, "a100", Reason.MEMORY_UNKNOWN),
        ("Tesla V100-SXM2-32GB", 32768, "v100-32gb", Reason.EXACT),
        ("Tesla V100-SXM2-16GB", None, "v100", Reason.EXACT),
        ("Tesla V100-FHHL-16GB", 16384, "v100", Reason.EXACT),
        ("NVIDIA V100", None, "v100", Reason.MEMORY_UNKNOWN),
        ("Tesla V100S-PCIE-32GB", 32768, "v100s", Reason.EXACT),
        ("NVIDIA H100 80GB HBM3", 81559, "h100", Reason.EXACT),
        ("NVIDIA H100 PCIe", None, "h100", Reason.EXACT),
        ("NVIDIA H100 NVL", 95830, "h100-nvl", Reason.EXACT),
        ("NVIDIA H100", 95830, "h100-nvl", Reason.EXACT),
        # a name with one word of the list
        ("NVIDIA H200", 143771, "h200", Reason.EXACT),
        ("NVIDIA H20", None, "h20", Reason.EXACT),
        ("NVIDIA H800", None, "h800", Reason.EXACT),
        ("NVIDIA A800-SXM4-80GB", 81920, "a800", Reason.EXACT),
        ("NVIDIA B200", 183359, "b200", Reason.EXACT),
        ("NVIDIA GB200", None, "gb200", Reason.EXACT),
        ("NVIDIA GH200 480GB", None, "gh200", Reason.EXACT),
        ("NVIDIA GB10", None, "gb10", Reason.EXACT),
        ("NVIDIA A100X", 81920, "a100x", Reason.EXACT),
        ("NVIDIA A10", 23028, "a10", Reason.EXACT),
        ("NVIDIA A10G", 23028, "a10g", Reason.EXACT),
        ("NVIDIA A16", None, "a16", Reason.EXACT),
        ("NVIDIA A2", None, "a2", Reason.EXACT),
        ("NVIDIA A30", None, "a30", Reason.EXACT),
        ("NVIDIA A40", 46068, "a40", Reason.EXACT),
        ("NVIDIA L4", 23034, "l4", Reason.EXACT),
        ("NVIDIA L40", 46068, "l40", Reason.EXACT),
        ("NVIDIA L40S", 46068, "l40s", Reason.EXACT),
        ("NVIDIA L40G", 24576, "l40g", Reason.EXACT),
        ("NVIDIA L20", None, "l20", Reason.EXACT),
        ("Tesla T4", 15360, "t4", Reason.EXACT),
        ("NVIDIA T4G", None, "t4g", Reason.EXACT),
        ("Tesla K80", None, "k80", Reason.EXACT),
        ("Tesla M60", None, "m60", Reason.EXACT),
        ("Tesla P4", None, "p4", Reason.EXACT),
        ("Tesla P40", None, "p40", Reason.EXACT),
        ("Tesla P100-PCIE-16GB", None, "p100", Reason.EXACT),
        ("Quadro P4000", 8192, "p4000", Reason.EXACT),
        ("NVIDIA-H100-80GB-HBM3", None, "h100", Reason.EXACT),
        ("Tesla-T4", None, "t4", Reason.EXACT),
        ("AMD Instinct MI300X OAM", 196592, "mi300x", Reason.EXACT),
        ("AMD_Instinct_MI300X_OAM", None, "mi300x", Reason.EXACT),
        ("AMD Instinct MI250X / MI250", None, "mi250x", Reason.EXACT),
        ("AMD Instinct MI210", None, "mi210", Reason.EXACT),
        # RTX products, in whose names letters mean other things
        ("NVIDIA RTX A4000", 16376, "a4000", Reason.EXACT),
        ("NVIDIA RTX A6000", 49140, "a6000", Reason.EXACT),
        ("NVIDIA RTX A1000", 8192, "rtxa1000", Reason.FALLBACK),
        ("NVIDIA RTX A3000 Laptop GPU", None, "rtxa3000-laptop", Reason.FALLBACK),
        ("NVIDIA RTX A5000 Laptop GPU", 16384, "rtxa5000-laptop", Reason.FALLBACK),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx6000-ada", Reason.EXACT),
        ("NVIDIA RTX 4000 SFF Ada Generation", None, "rtx4000-sff-ada", Reason.EXACT),
        (
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
            97887,
            "rtxpro6000",
            Reason.EXACT,
        ),
        ("Quadro RTX 5000", None, "quadro-rtx5000", Reason.FALLBACK),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090", Reason.EXACT),
        ("NVIDIA GeForce RTX 3080 Ti", None, "rtx3080-ti", Reason.EXACT),
        ("NVIDIA GeForce RTX 4090 D", None, "rtx4090-d", Reason.EXACT),
        ("NVIDIA-GeForce-RTX-3090", None, "rtx3090", Reason.EXACT),
        ("NVIDIA RTX PRO", None, "rtx-pro", Reason.FALLBACK),
        ("NVIDIA RTX", None, None, Reason.NO_MODEL),
        ("NVIDIA RTX 24GB", None, None, Reason.NO_MODEL),
        # names of unlisted products are only suggested
        ("NVIDIA T400 4GB", 4096, "t400", Reason.FALLBACK),
        ("Quadro P2000", None, "quadro-p2000", Reason.FALLBACK),
        ("NVIDIA GeForce GTX 1080 Ti", None, "gtx-1080-ti", Reason.FALLBACK),
        ("NVIDIA TITAN V", None, "titan-v", Reason.FALLBACK),
        ("Intel Data Center GPU Flex 170", None, "flex-170", Reason.FALLBACK),
        # partitions, virtual devices, no names
        ("GRID A100X-40C", 40960, None, Reason.VGPU),
        ("NVIDIA A40-48Q", 49152, None, Reason.VGPU),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", None, None, Reason.MIG),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None, None, Reason.MIG),
        ("", None, None, Reason.NO_NAME),
        ("  \n", None, None, Reason.NO_NAME),
        ("Failed to initialize NVML: Driver/library version mismatch", 1, None, Reason.NOT_A_NAME),
        ("No devices were found", None, None, Reason.NOT_A_NAME),
        ("[Unknown Error]", None, None, Reason.NOT_A_NAME),
        ("[N/A]", None, None, Reason.NOT_A_NAME),
        ("ERR!", None, None, Reason.NOT_A_NAME),
        ("NVIDIA Graphics", None, None, Reason.NO_MODEL),
        ("数据中心", None, None, Reason.NO_MODEL),
        ("RTX " + "x" * 300, None, None, Reason.NOT_A_NAME),
    ],
)
def test_each_product_has_one_name(
    product: str, memory_mib: int | None, value: str | None, reason: Reason
) -> None:
    assert accelerators.name(product, memory_mib) == Name(value, reason)


def test_what_is_shared_says_so_and_keeps_its_name() -> None:
    name = accelerators.name("NVIDIA-A100-SXM4-80GB-SHARED")
    assert name == Name("a100-80gb", Reason.EXACT, is_shared=True)


def test_partitions_that_only_nvml_knows_of_have_no_name() -> None:
    assert accelerators.name("NVIDIA A100-SXM4-80GB", is_mig=True) == Name(None, Reason.MIG)
    assert accelerators.name("NVIDIA A100-SXM4-80GB", is_vgpu=True) == Name(None, Reason.VGPU)


def test_an_alias_wins_over_guesses_and_never_over_refusals() -> None:
    aliases = {"NVIDIA T400 4GB": "t400-small", "NVIDIA A100-SXM4-80GB MIG 3g.40gb": "a100"}
    names = [
        accelerators.name(product, aliases=aliases)
        for product in (*aliases, "nvidia t400 4gb ", "NVIDIA-T400-4GB", "NVIDIA T400 4GB X")
    ]
    assert names == [
        Name("t400-small", Reason.ALIAS),
        Name(None, Reason.MIG),
        Name("t400-small", Reason.ALIAS),
        Name("t400-small", Reason.ALIAS),
        Name("t400-x", Reason.FALLBACK),
    ]


@pytest.mark.parametrize("memory_mib", [0, -5])
def test_no_memory_is_unknown_memory(memory_mib: int) -> None:
    assert accelerators.name("NVIDIA A100-SXM4-80GB", memory_mib) == Name("a100-80gb", Reason.EXACT)
    assert accelerators.name("NVIDIA A100", memory_mib) == Name("a100", Reason.MEMORY_UNKNOWN)


@pytest.mark.parametrize(
    ("products", "name"),
    [
        ([], Name(None, Reason.NO_NAME)),
        (["Tesla T4", "Tesla T4"], Name("t4", Reason.EXACT)),
        (["Tesla T4", "NVIDIA L4"], Name(None, Reason.MIXED)),
        (["Tesla T4", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"], Name(None, Reason.MIXED)),
        (["NVIDIA A100-SXM4-40GB", "NVIDIA A100"], Name("a100", Reason.MEMORY_UNKNOWN)),
        (["GRID A100X-40C", "GRID A100X-20C"], Name(None, Reason.VGPU)),
    ],
)
def test_a_node_has_the_one_name_of_its_gpus_or_none(products: list[str], name: Name) -> None:
    assert accelerators.of_node(accelerators.name(product) for product in products) == name


VOCABULARY = """NVIDIA Tesla Quadro GeForce RTX PRO Ada SFF A100 A4000 A1000 V100 H100 NVL T4 L40S
    P4000 MI300X Laptop GPU SHARED 80GB 40g 32GB 1g.5gb MIG 40C Ti . - _ é"""
WORDS = st.sampled_from(VOCABULARY.split())


@given(
    product=st.one_of(st.text(max_size=400), st.lists(WORDS, max_size=8).map(" ".join)),
    memory_mib=st.none() | st.integers(0, 2**53),
)
def test_every_name_is_a_lower_case_label_value(product: str, memory_mib: int | None) -> None:
    name = accelerators.name(product, memory_mib)
    named = {Reason.EXACT, Reason.FALLBACK, Reason.MEMORY_UNKNOWN}
    assert (name.value is not None) == (name.reason in named)
    if name.value is not None:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?", name.value)


@given(product=st.lists(WORDS, max_size=8).map(" ".join), model=st.sampled_from(["a40", "t4"]))
def test_no_part_of_a_word_makes_a_name(product: str, model: str) -> None:
    if accelerators.name(product) == Name(model, Reason.EXACT):
        assert model in re.split(r"[^a-z0-9.]+", product.lower())
