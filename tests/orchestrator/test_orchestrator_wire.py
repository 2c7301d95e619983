"""The codec of the batch socket."""

from __future__ import annotations

import msgpack
import pytest

from prl.orchestrator.wire import (
    Want,
    decode_shipment,
    decode_want,
    encode_refusal,
    encode_shipment,
    encode_want,
)
from prl.records import MicroBatch


def row(**streams: list[float]) -> MicroBatch:
    return MicroBatch(
        [1, 2, 3], [0, 1, 0], [False, True, True], [0.0, 0.5, -0.5], [0.0, -1.25, -0.1], [1.0, 1.0, 0.7],
        [2, 1], ["a", "b"], ["t1", "t2"], **streams,
    )  # fmt: skip


@pytest.mark.parametrize(
    "streams",
    [
        {},
        {"rl_weights": [1.0, 0.0, 1.0]},
        {"ref_logprobs": [0.0, -0.5, -0.25], "ref_kl_weights": [0.0, 1.0, 1.0]},
        {"ce_weights": [0.1, 0.0, 0.1]},
    ],
)
def test_a_shipment_comes_back_bit_for_bit(streams: dict[str, list[float]]) -> None:
    rows = [row(**streams), row()]
    shipment = decode_shipment(encode_shipment(7, 1, rows))
    assert (shipment.step, shipment.rank) == (7, 1)
    assert shipment.micro_batches == rows
    assert shipment.micro_batches[0].inference_logprobs[2] == -0.1, "no rounding to single precision"


def test_a_shipment_is_the_documented_map_of_positional_arrays() -> None:
    content = msgpack.unpackb(encode_shipment(3, 0, [row(rl_weights=[1.0, 0.0, 1.0])]))
    assert list(content) == ["step", "rank", "micro_batches"]
    (fields,) = content["micro_batches"]
    assert fields[:3] == [[1, 2, 3], [0, 1, 0], [False, True, True]]
    assert fields[9:] == [None, [1.0, 0.0, 1.0], None, None]


def test_a_row_of_an_older_writer_lacks_only_optional_fields() -> None:
    content = msgpack.unpackb(encode_shipment(3, 0, [row()]))
    content["micro_batches"] = [content["micro_batches"][0][:9]]
    assert decode_shipment(msgpack.packb(content)).micro_batches == [row()]


def test_a_row_without_its_required_fields_is_refused() -> None:
    content = {"step": 3, "rank": 0, "micro_batches": [[[1], [0]]]}
    with pytest.raises(ValueError, match="required fields"):
        decode_shipment(msgpack.packb(content))


def test_a_refusal_raises_with_its_reason() -> None:
    with pytest.raises(ValueError, match="batch 9 is gone"):
        decode_shipment(encode_refusal("batch 9 is gone"))


def test_a_request_comes_back() -> None:
    assert decode_want(encode_want(Want(5, 1, 2))) == Want(5, 1, 2)
    assert msgpack.unpackb(encode_want(Want(5, 1, 2))) == {"want": 5, "rank": 1, "world": 2}


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb({"want": 1, "rank": 0})]
)
def test_garbage_is_no_request(message: bytes) -> None:
    with pytest.raises(ValueError):
        decode_want(message)
