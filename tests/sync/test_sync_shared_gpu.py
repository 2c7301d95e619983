"""Memory of one GPU between processes: what can be told without one (tests/gpu has the rest)."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from prl.sync.shared_gpu import REMEDY, SharedGpu, decode, encode


def test_a_handle_travels_as_text():
    shared = (bytes(range(256)), 256_000_000, 2048, b"/torch_1_2", 3, b"", True)
    assert decode(encode(shared)) == list(shared)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_memory_cannot_be_shared_both_ends_say_what_to_choose(rank):
    store = dist.HashStore()
    store.set("lent/1", encode((b"handle", 8, 0, b"counter", 0, b"event", True)))
    end = SharedGpu(store, rank, 1, timedelta(seconds=1))
    with pytest.raises((RuntimeError, AssertionError), match="sync=filesystem") as caught:
        end.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert str(caught.value) == REMEDY and caught.value.__cause__ is not None


def test_a_sender_that_never_lends_is_waited_for_in_vain():
    end = SharedGpu(dist.HashStore(), 1, 1, timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        end.broadcast(torch.zeros(8, dtype=torch.uint8))
