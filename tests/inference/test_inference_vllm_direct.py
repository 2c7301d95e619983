"""Weights written past vLLM's loader lie just where it would have put them, over stand-ins for its layers."""

from types import SimpleNamespace

import pytest
import torch
import vllm_stand_ins as stand_ins

from prl.inference import vllm_worker
from prl.inference.vllm_direct import DirectWriter
from prl.inference.vllm_layout import Layout
from prl.inference.vllm_worker import WorkerExtension
from prl.sync.fingerprint import fingerprint
from prl.sync.weight_files import TensorSpec


def changed(named, by=1.0):
    return {name: tensor + by for name, tensor in named.items()}


def shapes(named):
    return {name: tuple(tensor.shape) for name, tensor in named.items()}


def state(model):
    return {name: value.detach().clone() for name, value in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("held_bytes", [1, 300, 1 << 20])
def test_every_rank_gets_just_its_part(ranks, experts, held_bytes, monkeypatch):
    """Whatever the copies are collected to: one tensor, a few, all."""
    monkeypatch.setattr("prl.inference.vllm_direct.HELD_BYTES", held_bytes)
    named = stand_ins.weights(experts)
    new = changed(named)
    for rank in range(ranks):
        model = stand_ins.model(named, rank, ranks, experts=experts)
        writer = DirectWriter.learn(Layout(model), shapes(named))
        writer.write(iter(new.items()))
        expected = state(stand_ins.model(new, rank, ranks, experts=experts))
        found = state(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), rank


def test_values_of_another_type_are_converted():
    named = stand_ins.weights()
    model = stand_ins.model(named)
    new = {name: tensor.to(torch.bfloat16) for name, tensor in changed(named).items()}
    DirectWriter.learn(Layout(model), shapes(named)).write(iter(new.items()))
    assert torch.equal(model.model.norm.weight, new["model.norm.weight"].float())


def test_weights_that_a_kernel_keeps_otherwise_are_left_to_the_loader():
    named = stand_ins.weights()
    packed = stand_ins.model(named)
    stand_ins.pack(packed.model.layers[0].mlp.down_proj)
    assert DirectWriter.learn(Layout(packed), shapes(named)) is None
    coded = stand_ins.model(named)
    coded.model.layers[0].mlp.down_proj.quant_method = stand_ins.CodesMethod()
    assert DirectWriter.learn(Layout(coded), shapes(named)) is None
    shuffled = stand_ins.weights(experts=True)
    model = stand_ins.model(shuffled, experts=True, backend="FLASHINFER_CUTLASS")
    assert DirectWriter.learn(Layout(model), shapes(shuffled)) is None


def test_it_takes_only_the_names_and_shapes_that_it_knows():
    named = stand_ins.weights()
    writer = DirectWriter.learn(Layout(stand_ins.model(named)), shapes(named))
    assert writer.takes(shapes(named)) and writer.takes(dict(reversed(shapes(named).items())))
    assert not writer.takes(shapes(named) | {"more": (1,)})
    assert not writer.takes(shapes(named) | {"model.norm.weight": (4, 2)})


class Source:
    """A version as a worker gets it."""

    def __init__(self, named):
        self.named = named

    def specs(self):
        return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in self.named.items()}

    def tensors(self):
        return iter(self.named.items())


class Worker(WorkerExtension):
    """Of a GPU, as far as the extension can tell. Its loader counts, and can be made to lose a tensor."""

    def __init__(self, named, source):
        self.model, self.device, self.rank = stand_ins.model(named), torch.device("cuda"), 0
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model, model_config=SimpleNamespace(quantization=None)
        )
        self.source, self.loads, self.lost = source, 0, ()

    def _prl_source(self, directory):
        return self.source

    def load(self, runner, tensors, device):
        self.loads += 1
        kept = {name: tensor for name, tensor in tensors if name not in self.lost}
        writer = DirectWriter.learn(Layout(self.model), shapes(self.source.named))
        writer.write(iter(kept.items()))


@pytest.fixture
def worker(monkeypatch):
    named = stand_ins.weights()
    made = Worker(named, Source(named))
    monkeypatch.setattr(vllm_worker, "load_in_place", made.load)
    return made


def update(worker, named, mode="sampled"):
    worker.source = Source(named)
    return worker.prl_load("anywhere", mode)


@pytest.mark.parametrize("mode", ["sampled", "full"])
def test_the_loader_does_the_first_update_and_the_writer_the_others(worker, mode):
    for version in range(4):
        named = changed(stand_ins.weights(), version)
        found = update(worker, named, mode)
        assert found == {"fingerprint": fingerprint(named.items(), mode), "different": [], "unproven": []}
        expected = state(stand_ins.model(named))
        assert all(torch.equal(value, expected[name]) for name, value in state(worker.model).items())
    assert worker.loads == 1


def test_what_the_loader_left_out_is_told_and_nothing_is_learnt_from_it(worker):
    worker.lost = ("model.norm.weight",)
    found = update(worker, changed(stand_ins.weights()))
    assert found["different"] == ["model.norm.weight"] and worker.prl_writer is None
    worker.lost = ()
    assert not update(worker, changed(stand_ins.weights(), 2))["different"]
    assert worker.loads == 2 and worker.prl_writer is not None


def test_other_tensors_go_through_the_loader_again(worker):
    update(worker, stand_ins.weights())
    fewer = {name: t for name, t in stand_ins.weights().items() if name != "model.norm.weight"}
    with pytest.raises(RuntimeError, match="1 parameters got no weights, model"):
        update(worker, fewer)
    assert worker.loads == 2


def test_a_value_that_changes_after_it_was_written_is_told(worker):
    update(worker, stand_ins.weights())
    write = worker.prl_writer.write

    def spoil(tensors):
        write(tensors)
        worker.model.model.norm.weight.data[3] += 1

    worker.prl_writer.write = spoil
    named = changed(stand_ins.weights())
    found = update(worker, named)
    assert found["different"] == ["model.norm.weight"]
    assert found["fingerprint"] != fingerprint(named.items())
    assert worker.prl_writer is None, "the loader does the next one"


def test_without_a_gpu_the_loader_does_every_update(worker):
    worker.device = torch.device("cpu")
    for version in range(2):
        update(worker, changed(stand_ins.weights(), version))
    assert worker.loads == 2 and worker.prl_writer is None
