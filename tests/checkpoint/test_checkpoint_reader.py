"""Reading DCP directories: safe metadata, clear errors."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from prl.checkpoint.reader import CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path):
    state = {"model.a": torch.arange(6.0).view(2, 3), "optim.b": torch.ones(4, dtype=torch.int64)}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_tensors_lists_shapes_and_types(checkpoint):
    tensors = CheckpointReader(checkpoint).tensors
    assert {name: (tuple(e.size), e.properties.dtype) for name, e in tensors.items()} == {
        "model.a": ((2, 3), torch.float32),
        "optim.b": ((4,), torch.int64),
    }


def test_bytes_entries_are_not_tensors(tmp_path):
    dcp.save({"x": torch.ones(2), "note": "any object"}, checkpoint_id=tmp_path, no_dist=True)
    reader = CheckpointReader(tmp_path)
    assert list(reader.tensors) == ["x"]
    with pytest.raises(AssertionError, match="note"):
        reader.read_into({"note": torch.ones(2)})


def test_torch_reads_the_same_metadata(checkpoint):
    mine = CheckpointReader(checkpoint).read_metadata()
    theirs = dcp.FileSystemReader(checkpoint).read_metadata()
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.storage_data == theirs.storage_data


class Attack:
    def __reduce__(self):
        return os.mkdir, ("/tmp/prl-checkpoint-metadata-ran-code",)


def test_metadata_that_would_run_code_is_refused(checkpoint):
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"unexpected type posix\.mkdir"):
        CheckpointReader(checkpoint).tensors  # noqa: B018
    assert not os.path.exists("/tmp/prl-checkpoint-metadata-ran-code")  # noqa: PTH110


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(3)])
def test_metadata_that_is_none_is_refused(checkpoint, content):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is (damaged|not checkpoint metadata)"):
        CheckpointReader(checkpoint).tensors  # noqa: B018


def test_truncated_metadata_is_refused(checkpoint):
    file = checkpoint / ".metadata"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match="damaged"):
        CheckpointReader(checkpoint).tensors  # noqa: B018


def test_no_checkpoint_is_said_so(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        CheckpointReader(tmp_path).tensors  # noqa: B018


def cut_data(file):
    file.write_bytes(file.read_bytes()[:100])


def garble_data(file):
    file.write_bytes(b"x" * file.stat().st_size)


@pytest.mark.parametrize("damage", [cut_data, garble_data, os.unlink])
def test_damaged_data_is_said_so(checkpoint, damage):
    damage(checkpoint / "__0_0.distcp")
    with pytest.raises(ValueError, match="dcp is missing or damaged"):
        CheckpointReader(checkpoint).read_into({"model.a": torch.zeros(2, 3)})
