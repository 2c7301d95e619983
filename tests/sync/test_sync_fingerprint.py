"""The fingerprint: equal for equal bits, different for anything else, whatever the order and the process."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.sync.fingerprint import MODES, SAMPLES_PER_TENSOR, Fingerprinter, fingerprint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


def tensors(seed: int = 0, size: int = 300) -> dict[str, torch.Tensor]:
    """A few named tensors, the first of them larger than the sample."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (size, size), "norm.weight": (size,), "scalar": (), "empty": (0, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_order_does_not_matter(mode):
    named = tensors()
    backwards = list(named.items())[::-1]
    assert fingerprint(named.items(), mode) == fingerprint(backwards, mode)


def test_equal_over_processes():
    code = (
        "import torch; from prl.sync.fingerprint import fingerprint; "
        "named = [('a', torch.arange(9000.).view(90, 100)), ('b', torch.ones(3))]; "
        "print(fingerprint(named, 'sampled'), fingerprint(named, 'full'))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    named = [("a", torch.arange(9000.0).view(90, 100)), ("b", torch.ones(3))]
    assert other.stdout.split() == [fingerprint(named, "sampled"), fingerprint(named, "full")]


def test_the_modes_do_not_agree_by_accident():
    small = [("a", torch.ones(3))]
    assert fingerprint(small, "sampled") != fingerprint(small, "full")


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 299 * 300), bit=st.integers(0, 31))
def test_full_mode_sees_one_bit_of_one_weight(position, bit):
    named = tensors()
    before = fingerprint(named.items(), "full")
    flat = named["embed.weight"].view(torch.int32).view(-1)
    flat[position] ^= (1 << bit) if bit < 31 else -(2**31)
    assert fingerprint(named.items(), "full") != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optimizer", [lambda p: torch.optim.AdamW(p, lr=1e-4), lambda p: torch.optim.SGD(p, lr=0.1)]
)
def test_sampled_mode_sees_an_optimizer_step(dtype, optimizer):
    model = torch.nn.Linear(700, 700, dtype=torch.float32)
    step = optimizer(model.parameters())

    def published():
        return fingerprint(((name, p.detach().to(dtype)) for name, p in model.named_parameters()))

    before = published()
    model(torch.randn(4, 700)).square().sum().backward()
    step.step()
    assert published() != before


def test_sampled_mode_reads_no_more_than_the_sample():
    named = tensors()
    before = fingerprint(named.items())
    read = (torch.arange(SAMPLES_PER_TENSOR) * 2_654_435_761) % (300 * 300)
    unread = next(position for position in range(300 * 300) if not (read == position).any())
    named["embed.weight"].view(-1)[unread] += 1.0
    assert fingerprint(named.items()) == before


def test_the_sample_reaches_every_column_and_row_region():
    rows, columns = 1024, 1024
    read = (torch.arange(SAMPLES_PER_TENSOR) * 2_654_435_761) % (rows * columns)
    assert len(torch.unique(read)) == SAMPLES_PER_TENSOR
    assert len(torch.unique(read % columns)) > 0.9 * columns
    assert len(torch.unique(read // columns)) > 0.9 * rows


def test_name_shape_and_dtype_count():
    one = torch.zeros(6)
    base = fingerprint([("a", one)])
    assert fingerprint([("b", one)]) != base
    assert fingerprint([("a", one.view(2, 3))]) != base
    assert fingerprint([("a", one.to(torch.int32))]) != base  # the same bits
    assert fingerprint([("a", one), ("b", one)]) != base


def test_two_tensors_may_not_swap_names():
    first, second = torch.zeros(4), torch.ones(4)
    straight, swapped = [("a", first), ("b", second)], [("a", second), ("b", first)]
    assert fingerprint(straight) != fingerprint(swapped)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_any_dtype(dtype, mode):
    values = (torch.arange(5000) % 2).to(dtype)
    changed = values.clone()
    changed[0] = 1 - values[0].to(torch.int64)
    assert fingerprint([("a", values)], mode) != fingerprint([("a", changed)], mode)


def test_views_count_as_their_values():
    whole = torch.randn(50, 200)
    view = whole[10:40, ::2]
    assert fingerprint([("a", view)], "full") == fingerprint([("a", view.contiguous())], "full")
    assert fingerprint([("a", whole.t())]) == fingerprint([("a", whole.t().contiguous())])


def test_gradient_tracking_tensors_are_accepted():
    weight = torch.nn.Parameter(torch.ones(3))
    assert fingerprint([("a", weight)]) == fingerprint([("a", torch.ones(3))])


def test_streaming_equals_the_whole():
    named = tensors()
    prints = Fingerprinter("full")
    for name, tensor in named.items():
        prints.add(name, tensor)
    assert prints.result() == fingerprint(named.items(), "full")


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"a\.weight: two tensors"):
        fingerprint([("a.weight", torch.ones(1)), ("a.weight", torch.ones(1))])


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'fast': must be one of sampled, full"):
        fingerprint([], "fast")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["sampled", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_and_cpu_agree(mode, dtype):
    named = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    on_gpu = {name: tensor.cuda() for name, tensor in named.items()}
    assert fingerprint(named.items(), mode) == fingerprint(on_gpu.items(), mode)


@pytest.mark.parametrize("shape", [(70, 90), (3, 2000), (40, 50, 6)])
def test_how_a_tensor_lies_in_memory_does_not_matter(shape):
    """Sampled without flattening it, which would copy it as a whole."""
    tensor = torch.randn(shape)
    turned = tensor.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous() and tensor.numel() > SAMPLES_PER_TENSOR
    for mode in MODES:
        assert fingerprint([("a", turned)], mode) == fingerprint([("a", tensor)], mode)
