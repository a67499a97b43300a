"""How options of fusermount become parameters of a mount, or are refused."""

import hypothesis
import hypothesis.strategies as st
import pytest

from muster_fuse.request import options

NOTHING = options.Parameters((("source", "fuse"),), (), 0)
STRINGS = {"source", "subtype", "max_read"}
FLAGS = {"ro", "sync", "dirsync", "default_permissions", "allow_other"}
ATTRIBUTES = 0x1 | 0x8 | 0x10
"""Read-only, no programs, no access times: MOUNT_ATTR bits of fsmount(2)."""


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        (b"", NOTHING),
        (b",,", NOTHING),
        (b"ro", NOTHING._replace(flags=("ro",), attributes=0x1)),
        (b"noexec,noatime", NOTHING._replace(attributes=0x18)),
        (b"dirsync,sync,sync", NOTHING._replace(flags=("dirsync", "sync"))),
        (b"allow_other", NOTHING._replace(flags=("allow_other",))),
        (b"default_permissions", NOTHING._replace(flags=("default_permissions",))),
        (b"max_read=0131072", NOTHING._replace(strings=(*NOTHING.strings, ("max_read", "131072")))),
        (b"rw,nonempty,auto_unmount,x-gvfs-hide,x-a=b,nosuid,nodev", NOTHING),
        (b"fd=7,rootmode=40000,user_id=0,group_id=0", NOTHING),
        (b"fsname=", NOTHING),
        (b"fsname=a,fsname=b", NOTHING._replace(strings=(("source", "b"),))),
        (
            b"subtype=sshfs",
            NOTHING._replace(strings=(("source", "sshfs"), ("subtype", "sshfs"))),
        ),
        (
            rb"fsname=host:/a\,b\\c=d,subtype=sshfs",
            NOTHING._replace(strings=(("source", r"host:/a,b\c=d"), ("subtype", "sshfs"))),
        ),
        (rb"fsname=a\,suid", NOTHING._replace(strings=(("source", "a,suid"),))),
        (b"fsname=a\\", NOTHING._replace(strings=(("source", "a\\"),))),
        (b"fsname=a\nb\x00\xff", NOTHING._replace(strings=(("source", "a\ufffdb\ufffd\ufffd"),))),
        (b"fsname=" + b"x" * 4000, NOTHING._replace(strings=(("source", "x" * 255),))),
        (
            b"fsname=" + b"\xc3\xa4" * 200,
            NOTHING._replace(
                strings=(("source", "\N{LATIN SMALL LETTER A WITH DIAERESIS}" * 127),)
            ),
        ),
    ],
)
def test_options_become_parameters(text: bytes, parameters: options.Parameters) -> None:
    assert options.parse(text, allow_other=True) == parameters


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            b"suid",
            "option 'suid' is refused: programs on a FUSE file system gain no privileges",
        ),
        (b"ro,dev", "option 'dev' is refused: device nodes on a FUSE file system cannot be used"),
        (b"blkdev", "option 'blkdev' is refused: block devices are not available to pods"),
        (
            b"blksize=512",
            "option 'blksize=512' is refused: block devices are not available to pods",
        ),
        (
            b"allow_root",
            (
                "option 'allow_root' is refused: use allow_other, or run the program as the user"
                " who needs the files"
            ),
        ),
        (
            b'context="u:r:t"',
            "option 'context=\"u:r:t\"' is refused: pods may not choose security labels",
        ),
        (b"max_read=-1", "option 'max_read=-1' is refused: its value must be a number of bytes"),
        (
            b"max_read=\xd9\xa1",
            "option 'max_read=\u0661' is refused: its value must be a number of bytes",
        ),
        (
            b"max_read=4294967296",
            "option 'max_read=4294967296' is refused: its value must be a number of bytes",
        ),
        (
            rb"su\id",
            "option 'suid' is refused: programs on a FUSE file system gain no privileges",
        ),
        (b"fsname", "option 'fsname' is refused: unknown to the broker; remove it"),
        (b"ro=1", "option 'ro=1' is refused: unknown to the broker; remove it"),
        (b"fd", "option 'fd' is refused: unknown to the broker; remove it"),
        (b"source=x", "option 'source=x' is refused: unknown to the broker; remove it"),
        (
            b"a\x1b[31m" + b"y" * 99,
            f"option 'a\ufffd[31m{'y' * 58}...' is refused: unknown to the broker; remove it",
        ),
    ],
)
def test_other_options_are_refused_with_the_word(text: bytes, why: str) -> None:
    with pytest.raises(options.RefusedOption) as refused:
        options.parse(text, allow_other=True)
    assert str(refused.value) == why


def test_allow_other_is_refused_where_the_settings_say_so() -> None:
    with pytest.raises(options.RefusedOption, match="the settings of the broker do not allow it"):
        options.parse(b"ro,allow_other", allow_other=False)


WORDS = ["suid", "dev", "blkdev", "blksize=", "context=", "allow_root", "allow_other", "ro", "rw"]
WORDS += ["fsname=", "subtype=", "max_read=", "9", "fd=", "source=", "noexec", "x-", "\\", ",", "="]


@hypothesis.given(
    st.one_of(
        st.binary(max_size=128),
        st.lists(st.sampled_from(WORDS), max_size=12).map("".join).map(str.encode),
        st.lists(st.sampled_from(WORDS), max_size=12).map(",".join).map(str.encode),
    ),
    st.booleans(),
)
def test_no_options_whatever_give_a_parameter_outside_the_list(
    text: bytes,
    allow_other: bool,  # noqa: FBT001  # drawn by hypothesis
) -> None:
    try:
        parameters = options.parse(text, allow_other=allow_other)
    except options.RefusedOption as error:
        refusal = str(error)
        parameters = NOTHING
    else:
        refusal = ""
    assert refusal.isprintable()
    keys = [key for key, _ in parameters.strings]
    assert len(keys) == len(set(keys))
    assert set(keys) <= STRINGS
    assert set(parameters.flags) <= FLAGS - ({"allow_other"} if not allow_other else set())
    assert not parameters.attributes & ~ATTRIBUTES
    for _, value in parameters.strings:
        assert value.isprintable()
        assert 0 < len(value.encode()) <= options.VALUE_MAX


@hypothesis.given(st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"]), max_size=63))
def test_a_name_survives_the_escaping_of_libfuse(name: str) -> None:
    escaped = name.replace("\\", r"\\").replace(",", r"\,")
    parameters = options.parse(f"ro,fsname={escaped},noexec".encode(), allow_other=True)
    assert parameters == options.Parameters((("source", name or "fuse"),), ("ro",), 0x9)
