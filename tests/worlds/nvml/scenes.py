"""Pure: nodes with NVIDIA GPUs as data, for the fake NVML.

The figures of products are those that nvidia-smi prints, as far as they are public; the memory of
the H100's instances is rounded.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

GPU_UUID: Final = "GPU-0a1b2c3d-0000-4000-8000-{:012d}"
MIG_UUID: Final = "MIG-0a1b2c3d-0000-5000-8000-{:06d}{:03d}{:03d}"
Value = int | str
"""A number; "-" means NOT_SUPPORTED, "!15" error 15."""

ONE_SWITCH, SWITCHES, HOST_BRIDGE, NODE, SYSTEM = 10, 20, 30, 40, 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A profile of a GPU instance; `number` is NVML's constant for it, `id` the driver's."""

    number: int
    id: int
    name: str
    slices: int
    instances: int
    memory_mb: int
    sm: int
    ce: int = 1
    dec: int = 0
    jpeg: int = 0
    ofa: int = 0


COMPUTE: Final[Mapping[int, int]] = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
"""NVML's constant of a compute profile, which is also the driver's id, by number of slices."""
COMPUTE_OF: Final[Mapping[int, tuple[int, ...]]] = {
    1: (1,),
    2: (1, 2),
    3: (1, 2, 3),
    4: (1, 2, 4),
    7: (1, 2, 3, 4, 7),
}


def _a100(name: str, number: int, id_: int, slices: int, instances: int, memory_mb: int) -> Profile:
    plus = name.endswith("+me")
    return Profile(
        number=number,
        id=id_,
        name=name,
        slices=slices,
        instances=instances,
        memory_mb=memory_mb,
        sm=14 * slices,
        ce=slices,
        dec={1: int(plus), 2: 1, 3: 2, 4: 2, 7: 5}[slices],
        jpeg=int(plus or slices == 7),
        ofa=int(plus or slices == 7),
    )


A100_40GB: Final = (
    _a100("1g.5gb", 0, 19, 1, 7, 4864),
    _a100("2g.10gb", 1, 14, 2, 3, 9856),
    _a100("3g.20gb", 2, 9, 3, 2, 19968),
    _a100("4g.20gb", 3, 5, 4, 1, 19968),
    _a100("7g.40gb", 4, 0, 7, 1, 40192),
    _a100("1g.5gb+me", 7, 20, 1, 1, 4864),
    _a100("1g.10gb", 9, 15, 1, 4, 9856),
)


def _h100(name: str, number: int, id_: int, slices: int, instances: int, memory_mb: int) -> Profile:
    plus = name.endswith("+me")
    return Profile(
        number=number,
        id=id_,
        name=name,
        slices=slices,
        instances=instances,
        memory_mb=memory_mb,
        sm={1: 16, 2: 32, 3: 60, 4: 64, 7: 132}[slices],
        ce=slices,
        dec=slices,
        jpeg=slices,
        ofa=int(plus or slices == 7),
    )


H100_80GB: Final = (
    _h100("1g.10gb", 0, 19, 1, 7, 9984),
    _h100("2g.20gb", 1, 14, 2, 3, 20096),
    _h100("3g.40gb", 2, 9, 3, 2, 40448),
    _h100("4g.40gb", 3, 5, 4, 1, 40448),
    _h100("7g.80gb", 4, 0, 7, 1, 81152),
    _h100("1g.10gb+me", 7, 20, 1, 1, 9984),
    _h100("1g.20gb", 9, 15, 1, 4, 20096),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mig:
    """A MIG device: a compute instance of `compute` slices in a GPU instance of `profile`."""

    profile: Profile
    slot: int
    gi: int
    ci: int = 0
    compute: int = 0
    """0 means all slices of the GPU instance."""
    uuid: str = ""

    def slices(self) -> int:
        """Return the number of compute slices."""
        return self.compute or self.profile.slices

    def name(self) -> str:
        """Return the name of the profile in nvidia-smi."""
        whole = self.slices() == self.profile.slices
        return self.profile.name if whole else f"{self.slices()}c.{self.profile.name}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; `values` are its differences from a healthy H100."""

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    values: Mapping[str, Value] = dataclasses.field(default_factory=dict)
    mig: tuple[Mig, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """The PCIe topology level between the GPUs `a` and `b`, and their number of direct NVLinks."""

    a: int
    b: int
    level: int = SYSTEM
    nvlinks: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scene:
    """The content of the state file; the GPUs are in NVML's order."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    profiles: tuple[Profile, ...] = ()
    driver: str = "580.95.05"
    cuda: int = 13000
    lines: tuple[str, ...] = ()
    """Further lines of the state file, as `fake` lists them."""

    def but(self, gpu: int, **values: Value) -> "Scene":
        """Return this scene with other answers of one GPU, such as `recovery=1`."""
        was = self.gpus[gpu]
        return self.having(gpu, dataclasses.replace(was, values={**was.values, **values}))

    def having(self, gpu: int, instead: Gpu) -> "Scene":
        """Return this scene with one GPU replaced."""
        gpus = (*self.gpus[:gpu], instead, *self.gpus[gpu + 1 :])
        return dataclasses.replace(self, gpus=gpus)

    def carved(self, gpu: int, *mig: Mig) -> "Scene":
        """Return this scene with one GPU in MIG mode, with these MIG devices."""
        was = self.gpus[gpu]
        values = {**was.values, "mig": 1, "mig_pending": 1}
        return self.having(gpu, dataclasses.replace(was, mig=mig, values=values))

    def whole(self, gpu: int) -> "Scene":
        """Return this scene with one GPU not in MIG mode."""
        was = self.gpus[gpu]
        values = {**was.values, "mig": 0, "mig_pending": 0}
        return self.having(gpu, dataclasses.replace(was, mig=(), values=values))

    def without(self, *gpus: int) -> "Scene":
        """Return this scene without some GPUs; the indices of later ones decrease."""
        stay = [n for n in range(len(self.gpus)) if n not in gpus]
        links = tuple(
            dataclasses.replace(link, a=stay.index(link.a), b=stay.index(link.b))
            for link in self.links
            if link.a in stay and link.b in stay
        )
        kept = tuple(self.gpus[n] for n in stay)
        return dataclasses.replace(self, gpus=kept, links=links)

    def also(self, *lines: str) -> "Scene":
        """Return this scene with further lines of the state file."""
        return dataclasses.replace(self, lines=(*self.lines, *lines))

    def mig_uuid(self, gpu: int, slot: int) -> str:
        """Return the uuid of the MIG device in that slot of a GPU."""
        return next(_mig_uuid(gpu, mig) for mig in self.gpus[gpu].mig if mig.slot == slot)

    def text(self) -> str:
        """Return the text of the state file."""
        return "\n".join((*_text(self), *self.lines, ""))


def _text(scene: Scene) -> Iterator[str]:
    yield f"driver {scene.driver}"
    yield f"cuda {scene.cuda}"
    for number, gpu in enumerate(scene.gpus):
        name = gpu.name.replace(" ", "_")
        yield _line(f"gpu {number} uuid={gpu.uuid} name={name}", gpu.values)
        for mig in gpu.mig:
            yield _line(f"mig {number}", _mig_values(number, mig))
    for link in scene.links:
        yield f"link {link.a} {link.b} level={link.level} nvlinks={link.nvlinks}"
    for profile in scene.profiles:
        yield _line("gprofile *", _profile_values(profile))
        for slices in COMPUTE_OF[profile.slices]:
            yield _line("cprofile *", _compute_values(profile, slices))


def _line(start: str, values: Mapping[str, Value]) -> str:
    return " ".join((start, *(f"{key}={value}" for key, value in values.items())))


def _mig_uuid(gpu: int, mig: Mig) -> str:
    return mig.uuid or MIG_UUID.format(gpu, mig.gi, mig.ci)


def _mig_values(gpu: int, mig: Mig) -> dict[str, Value]:
    profile = mig.profile
    return {
        "slot": mig.slot,
        "gi": mig.gi,
        "ci": mig.ci,
        "uuid": _mig_uuid(gpu, mig),
        "name": mig.name(),
        "gprofile": profile.number,
        "cprofile": COMPUTE[mig.slices()],
        "memory_mb": profile.memory_mb,
        "sm": profile.sm * mig.slices() // profile.slices,
        "gi_slices": profile.slices,
        "ci_slices": mig.slices(),
        **{key: getattr(profile, key) for key in ("ce", "dec", "jpeg", "ofa")},
    }


def _profile_values(profile: Profile) -> dict[str, Value]:
    values = dataclasses.asdict(profile)
    values["profile"] = values.pop("number")
    return values


def _compute_values(profile: Profile, slices: int) -> dict[str, Value]:
    whole = slices == profile.slices
    return {
        "gprofile": profile.number,
        "profile": COMPUTE[slices],
        "id": COMPUTE[slices],
        "name": profile.name if whole else f"{slices}c.{profile.name}",
        "slices": slices,
        "instances": profile.slices // slices,
        "sm": profile.sm * slices // profile.slices,
        **{key: getattr(profile, key) for key in ("ce", "dec", "jpeg", "ofa")},
    }


def h100x8() -> Scene:
    """Return an HGX H100: eight GPUs, all on NVSwitches, each pair joined by PCIe switches.

    As on real machines, minor numbers differ from indices.
    """
    buses = ("1B", "1C", "43", "44", "9D", "9E", "C3", "C4")
    gpus = tuple(
        Gpu(
            uuid=GPU_UUID.format(n),
            values={
                "minor": (n + 3) % 8,
                "bus": f"00000000:{bus}:00.0",
                "mig": 0,
                "numa": n // 4,
                "switch_links": 18,
                "fabric": 3,
            },
        )
        for n, bus in enumerate(buses)
    )
    return Scene(gpus=gpus, links=_pairs(8, pair=SWITCHES, socket=NODE), profiles=H100_80GB)


def _pairs(
    count: int, *, pair: int, socket: int, nvlinks: Sequence[str] | None = None
) -> tuple[Link, ...]:
    """Return the links of GPUs in pairs of level `pair` and groups of four of level `socket`."""

    def level(a: int, b: int) -> int:
        if a // 2 == b // 2:
            return pair
        return socket if a // 4 == b // 4 else SYSTEM

    return tuple(
        Link(a=a, b=b, level=level(a, b), nvlinks=int(nvlinks[a][b]) if nvlinks else 0)
        for a in range(count)
        for b in range(a + 1, count)
    )


DGX1_NVLINKS: Final = (
    "01122000",
    "10210200",
    "12020010",
    "21200001",
    "20000112",
    "02001021",
    "00101202",
    "00012120",
)
"""The matrix of a DGX-1 with V100s, as `nvidia-smi topo -m` prints it."""


def dgx1() -> Scene:
    """Return a DGX-1: eight V100s, joined directly by NVLinks as a hybrid cube mesh."""
    buses = ("06", "07", "0A", "0B", "85", "86", "89", "8A")
    gpus = tuple(
        Gpu(
            uuid=GPU_UUID.format(100 + n),
            name="Tesla V100-SXM2-16GB",
            values={
                "bus": f"00000000:{bus}:00.0",
                "memory": 16945512448,
                "cc": "7.0",
                "brand": 2,
                "cores": 5120,
                "numa": n // 4,
                "nvlink_version": 2,
                "recovery": "-",
                "slowdown": 87,
                "shutdown": 90,
            },
        )
        for n, bus in enumerate(buses)
    )
    links = _pairs(8, pair=ONE_SWITCH, socket=HOST_BRIDGE, nvlinks=DGX1_NVLINKS)
    return Scene(gpus=gpus, links=links)


def a100_mig() -> Scene:
    """Return three A100s, of which the first two are in MIG mode.

    The first has mixed profiles and an empty slot; its 3g instance is shared by a `1c.3g` and a
    `2c.3g`. The second has seven 1g devices.
    """
    device, two, three = A100_40GB[:3]
    gpus = tuple(
        Gpu(
            uuid=GPU_UUID.format(200 + n),
            name="NVIDIA A100-SXM4-40GB",
            values={
                "minor": n + 1,
                "bus": f"00000000:{bus}:00.0",
                "memory": 42505273344,
                "cc": "8.0",
                "pci_device": 0x20B010DE,
                "cores": 6912,
                "numa": 0,
                "mig": 0,
            },
        )
        for n, bus in enumerate(("07", "0F", "47"))
    )
    scene = Scene(gpus=gpus, links=_pairs(3, pair=ONE_SWITCH, socket=NODE), profiles=A100_40GB)
    scene = scene.carved(
        0,
        Mig(profile=device, slot=0, gi=9),
        Mig(profile=two, slot=2, gi=3),
        Mig(profile=three, slot=3, gi=2, ci=0, compute=1),
        Mig(profile=three, slot=4, gi=2, ci=1, compute=2),
    )
    return scene.carved(1, *(Mig(profile=device, slot=n, gi=7 + n) for n in range(7)))


def t4() -> Scene:
    """Return one T4, which lacks MIG, row remapping, fabric and the recovery action."""
    return Scene(
        gpus=(
            Gpu(
                uuid=GPU_UUID.format(300),
                name="Tesla T4",
                values={
                    "bus": "00000000:00:1E.0",
                    "memory": 16106127360,
                    "cc": "7.5",
                    "brand": 2,
                    "pci_device": 0x1EB810DE,
                    "cores": 2560,
                    "recovery": "-",
                    "slowdown": 93,
                    "shutdown": 96,
                },
            ),
        )
    )
