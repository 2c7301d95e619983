"""Flat runs as boxes, and DCP save and load of them across layouts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.metadata import MetadataIndex

from prl.checkpoint.fragments import ZeroFragment, boxes
from prl.checkpoint.reader import CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def runs(draw):
    shape = draw(SHAPES)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@settings(max_examples=300, deadline=None)
@given(runs())
def test_boxes_cover_the_run_in_order_and_are_few(run):
    shape, start, stop = run
    x = torch.arange(math.prod(shape)).view(shape)
    found = boxes(shape, start, stop)
    covered = []
    for offsets, sizes, low, high in found:
        block = x[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten().tolist()
        assert block == list(range(low, high))
        covered += block
    assert covered == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_boxes_of_a_matrix_by_hand():
    assert boxes((3, 4), 2, 9) == [((0, 2), (1, 2), 2, 4), ((1, 0), (1, 4), 4, 8), ((2, 0), (1, 1), 8, 9)]
    assert boxes((3, 4), 5, 7) == [((1, 1), (1, 2), 5, 7)]
    assert boxes((3, 4), 4, 12) == [((1, 0), (2, 4), 4, 12)]
    assert boxes((), 0, 1) == [((), (), 0, 1)]
    assert boxes((2, 0, 3), 0, 0) == []


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A checkpoint of one tensor of each rank, written as two fragments by one process."""
    path = tmp_path_factory.mktemp("dcp")
    tensors = {
        "cube": torch.randn(4, 5, 3, dtype=torch.float64),
        "matrix": torch.randn(7, 3),
        "vector": torch.randn(11).bfloat16(),
        "scalar": torch.tensor(2.5),
    }
    whole = {name: ZeroFragment(t.view(-1), t.shape, 0) for name, t in tensors.items()}
    dcp_save(whole, storage_writer=FileSystemWriter(path), planner=DefaultSavePlanner(), no_dist=True)
    return path, tensors


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_run_is_read_back_from_whole_tensors(stored, data):
    path, tensors = stored
    name = data.draw(st.sampled_from(sorted(tensors)))
    flat = tensors[name].flatten()
    start = data.draw(st.integers(0, flat.numel()))
    stop = data.draw(st.integers(start, flat.numel()))
    buffer = torch.full((stop - start,), -1.0, dtype=flat.dtype)
    CheckpointReader(path).read_into({name: ZeroFragment(buffer, tensors[name].shape, start)})
    assert torch.equal(buffer, flat[start:stop])


def test_whole_tensors_are_read_and_converted(stored):
    path, tensors = stored
    target = torch.zeros(4, 5, 3, dtype=torch.bfloat16)
    CheckpointReader(path).read_into({"cube": target})
    assert torch.equal(target, tensors["cube"].bfloat16())


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 60), other=st.integers(0, 60))
def test_fragments_cut_anywhere_make_one_tensor(tmp_path_factory, cut, other):
    """Two fragments under two names, so that one process may write both; then any other cut reads them."""
    path, x = tmp_path_factory.mktemp("cut"), torch.arange(60.0)
    halves = {"low": ZeroFragment(x[:cut], (4, 5, 3), 0), "high": ZeroFragment(x[cut:], (4, 5, 3), cut)}
    items = {name: half.__create_write_items__(name, half) for name, half in halves.items()}
    sizes = [math.prod(item.tensor_data.chunk.sizes) for name in items for item in items[name]]
    assert sum(sizes) == 60
    for name, half in halves.items():
        for item in items[name]:
            shard = half.__get_tensor_shard__(item.index)
            assert shard.shape == item.tensor_data.chunk.sizes and item.tensor_data.size == (4, 5, 3)
            at = tuple(
                slice(o, o + s) for o, s in zip(item.index.offset, item.tensor_data.chunk.sizes, strict=True)
            )
            assert torch.equal(shard, x.view(4, 5, 3)[at])
    dcp_save({"x": ZeroFragment(x, (4, 5, 3), 0)}, checkpoint_id=path, no_dist=True)
    buffer = torch.zeros(60 - other)
    CheckpointReader(path).read_into({"x": ZeroFragment(buffer, (4, 5, 3), other)})
    assert torch.equal(buffer, x[other:])


def test_loading_writes_into_the_callers_memory():
    buffer = torch.zeros(10)
    fragment = ZeroFragment(buffer[2:6], (3, 4), 5)
    fragment.__get_tensor_shard__(MetadataIndex("x", [1, 1])).fill_(7.0)
    assert buffer.tolist() == [0, 0, 7, 7, 7, 0, 0, 0, 0, 0]


def test_a_fragment_is_for_nothing_else():
    fragment = ZeroFragment(torch.zeros(4), (3, 4), 5)
    assert fragment.shape == (3, 4) and repr(fragment) == "ZeroFragment((3, 4), 5:9)"
    with pytest.raises(TypeError, match="only for saving and loading"):
        fragment.sum()
    with pytest.raises(LookupError):
        fragment.__get_tensor_shard__(MetadataIndex("x", [0, 0]))
    with pytest.raises(AssertionError):
        ZeroFragment(torch.zeros(9), (3, 4), 5)
