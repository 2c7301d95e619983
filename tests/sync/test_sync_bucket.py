"""What a fingerprint reads of a bucket, gathered at once, is what it reads of each tensor."""

import pytest
import torch

from prl.sync.bucket import covered_in, view_of
from prl.sync.fingerprint import MODES, SAMPLES_PER_TENSOR, covered_copy
from prl.sync.offer import Offer, OfferedTensor, bucket_size

SIZES = {
    "long": (3, SAMPLES_PER_TENSOR),
    "short": (5, 7),
    "edge": (SAMPLES_PER_TENSOR,),
    "one": (),
    "none": (0, 4),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def filled(types, bucket_bytes=10**9):
    """(name -> tensor, buckets, the buffer of each) of tensors of these types, interleaved."""
    random = torch.Generator().manual_seed(1)
    named, offered = {}, []
    for key, shape in SIZES.items():
        for kind in types:
            named[f"{key}.{kind}"] = torch.randn(shape, generator=random).to(TYPES[kind])
            offered.append(OfferedTensor(f"{key}.{kind}", kind, shape))
    offer = Offer("s", "127.0.0.1", 1, 1.0, bucket_bytes, tuple(offered), None)
    buffers = []
    for bucket in offer.buckets:
        buffer = torch.zeros(bucket_size(bucket), dtype=torch.uint8)
        for tensor, offset in bucket:
            view_of(buffer, tensor, offset).copy_(named[tensor.name])
        buffers.append(buffer)
    return named, offer.buckets, buffers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("types", [["float32"], ["bfloat16"], ["bfloat16", "float32", "float64"]])
@pytest.mark.parametrize("bucket_bytes", [1, 30_000, 10**9])
def test_the_elements_are_those_of_each_tensor_alone(mode, types, bucket_bytes):
    named, buckets, buffers = filled(types, bucket_bytes)
    found = {}
    for bucket, buffer in zip(buckets, buffers, strict=True):
        here = covered_in(bucket, buffer, mode)
        assert list(here) == [tensor.name for tensor, _ in bucket], "in the order in which they are yielded"
        found |= here
    assert found.keys() == named.keys()
    for name, tensor in named.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], covered_copy(tensor, mode))


def test_samples_outlive_the_buffer_they_came_in():
    named, (bucket,), (buffer,) = filled(["bfloat16", "float32"])
    found = covered_in(bucket, buffer, "sampled")
    buffer.zero_()
    assert all(torch.equal(found[name], covered_copy(tensor, "sampled")) for name, tensor in named.items())


def test_a_tensor_is_viewed_in_its_place():
    _, (bucket,), (buffer,) = filled(["float32"])
    tensor, offset = bucket[1]
    view_of(buffer, tensor, offset)[0, 0] = 7.5
    assert buffer[offset : offset + 4].view(torch.float32).item() == 7.5
