from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from muster_fuse.request import caller
from muster_fuse.volume import state

_RECORD = state.Record(
    pod=caller.Pod(uid="0d5b8a6e-6c4f-4a43-9a43-1f4f3c1f7f55", namespace="team", name="train-0"),
    volumes={"csi-1": "/var/lib/kubelet/pods/x/volumes/kubernetes.io~csi/fuse/mount"},
)


def test_a_saved_pod_is_loaded_until_it_is_forgotten(tmp_path: Path) -> None:
    records = state.Records(tmp_path / "records")
    assert records.load() == ({}, [])
    records.save(_RECORD)
    assert state.Records(tmp_path / "records").load() == ({_RECORD.pod.uid: _RECORD}, [])
    records.forget(_RECORD.pod.uid)
    records.forget(_RECORD.pod.uid)
    assert records.load() == ({}, [])


def test_a_write_that_was_cut_short_leaves_the_previous_record(tmp_path: Path) -> None:
    records = state.Records(tmp_path)
    records.save(_RECORD)
    (tmp_path / f"{_RECORD.pod.uid}.json.new").write_text('{"uid"')
    assert records.load() == ({_RECORD.pod.uid: _RECORD}, [])
    assert [path.name for path in tmp_path.iterdir()] == [f"{_RECORD.pod.uid}.json"]


def test_files_that_are_no_records_are_named_and_the_others_are_loaded(tmp_path: Path) -> None:
    records = state.Records(tmp_path)
    records.save(_RECORD)
    good = (tmp_path / f"{_RECORD.pod.uid}.json").read_bytes()
    (tmp_path / "torn.json").write_bytes(good[:20])
    (tmp_path / "other.json").write_bytes(good)
    (tmp_path / "long.json").write_bytes(b" " * 70_000)
    (tmp_path / "folder").mkdir()
    loaded, problems = records.load()
    assert loaded == {_RECORD.pod.uid: _RECORD}
    assert [problem.removeprefix(f"{tmp_path}/").partition(":")[0] for problem in problems] == [
        "folder",
        "long.json",
        "other.json",
        "torn.json",
    ]
    assert problems[2] == (
        f"{tmp_path}/other.json: contains the record of another pod, {_RECORD.pod.uid}"
    )


@hypothesis.given(text=st.binary(max_size=300))
def test_no_text_of_a_record_stops_the_start(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    directory = tmp_path_factory.mktemp("records")
    (directory / "a.json").write_bytes(text)
    loaded, problems = state.Records(directory).load()
    assert len(loaded) + len(problems) == 1
