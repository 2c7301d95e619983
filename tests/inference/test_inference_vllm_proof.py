"""The fingerprint of what a vLLM worker serves, over layers that hold weights as vLLM's do."""

import pytest
import torch
import vllm_stand_ins as stand_ins
from torch import nn

from prl.inference.vllm_adapter_layout import AdapterLayout
from prl.inference.vllm_layout import Layout
from prl.inference.vllm_proof import Received, ServedProof, _Known, fetch
from prl.sync.bucket import view_of
from prl.sync.fingerprint import SAMPLES_PER_TENSOR, fingerprint
from prl.sync.offer import Offer, OfferedTensor, bucket_size

Q, K, GATE = (f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))
EMBEDDING = "model.embed_tokens.weight"
MODES = ("sampled", "full")


def proof(model, named, mode="full", layout=None):
    received = Received(mode)
    for _ in received.watch(iter(named.items())):
        pass
    return ServedProof(layout or Layout(model, all_columns=mode == "full"), mode).result(received)


def held(model, named):
    """Name -> a tensor like the named one, with True where this worker holds it, all of it checked."""
    layout, masks = Layout(model), {}
    for name, tensor in named.items():
        mask = torch.zeros(tensor.shape, dtype=torch.bool)
        for block in layout.blocks(name, tuple(tensor.shape)):
            place = tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))
            assert torch.equal(block.read(), tensor[place]), name
            mask[place] = True
        masks[name] = mask
    return masks


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_workers_together_hold_every_element(ranks, experts):
    """With 4 ranks each of the 2 key heads is on two of them."""
    named = stand_ins.weights(experts)
    masks = [held(stand_ins.model(named, rank, ranks, experts=experts), named) for rank in range(ranks)]
    for name in named:
        assert torch.stack([mask[name] for mask in masks]).any(0).all(), name
    counts = torch.stack([mask[K] for mask in masks]).sum(0)
    assert counts.unique().tolist() == [max(1, ranks // 2)]


def test_experts_of_other_workers_are_nothing_to_prove():
    named = stand_ins.weights(experts=True)
    models = [stand_ins.model(named, experts=True, whole=(rank, 2)) for rank in range(2)]
    masks = [held(model, named) for model in models]
    down = "model.layers.0.mlp.experts.{}.down_proj.weight"
    assert [bool(masks[0][down.format(n)].all()) for n in range(4)] == [True, False, True, False]
    assert [bool(masks[1][down.format(n)].any()) for n in range(4)] == [False, True, False, True]
    for model in models:
        assert proof(model, named) == {"fingerprint": published(named), "different": [], "unproven": []}


def published(named, mode="full"):
    return fingerprint(named.items(), mode)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_served_as_published_has_its_fingerprint(mode, ranks):
    named = stand_ins.weights()
    for rank in range(ranks):
        found = proof(stand_ins.model(named, rank, ranks), named, mode)
        assert found == {"fingerprint": published(named, mode), "different": [], "unproven": []}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(stand_ins.weights()))
def test_one_tensor_of_other_values_changes_the_fingerprint(name, mode):
    """The stand-in for a loader that skips a tensor, or puts it where another belongs."""
    named = stand_ins.weights()
    kept = {**named, name: named[name].flip(0)}
    found = proof(stand_ins.model(kept), named, mode)
    assert found["different"] == [name]
    assert found["fingerprint"] == published(kept, mode) != published(named, mode)


def test_one_rank_of_two_that_is_wrong_is_enough():
    named = stand_ins.weights()
    models = [stand_ins.model(named, rank, 2) for rank in range(2)]
    models[1].model.layers[0].mlp.down_proj.weight.zero_()
    prints = [proof(model, named)["fingerprint"] for model in models]
    assert prints[0] == published(named) != prints[1]


@pytest.mark.parametrize("mode", MODES)
def test_large_tensors_are_compared_where_they_are_sampled(mode):
    """Every rank sees the samples that fall into its rows."""
    size = 3 * SAMPLES_PER_TENSOR
    named = stand_ins.weights()
    named[GATE] = torch.randn(stand_ins.FFN, size)
    named["model.layers.0.mlp.up_proj.weight"] = torch.randn(stand_ins.FFN, size)
    for rank in range(2):
        model = stand_ins.model(named, rank, 2)
        assert proof(model, named, mode)["fingerprint"] == published(named, mode)
        rows = stand_ins.FFN // 2
        model.model.layers[0].mlp.gate_up_proj.weight[:rows] += 1  # the gate's half
        kept = named[GATE].clone()
        kept[rank * rows : (rank + 1) * rows] += 1
        found = proof(model, named, mode)
        assert found["different"] == [GATE]
        assert found["fingerprint"] == published({**named, GATE: kept}, mode)


@pytest.mark.parametrize("mode", MODES)
def test_weights_packed_for_the_cpu_are_read_through_their_kernel(mode):
    named = stand_ins.weights()
    named[Q][0, 0] = -0.0  # the kernel gives 0.0
    model = stand_ins.model(named)
    layer = model.model.layers[0]
    packed = {"qkv": stand_ins.pack(layer.self_attn.qkv_proj), "down": stand_ins.pack(layer.mlp.down_proj)}
    stand_ins.pack(layer.mlp.gate_up_proj)
    right = {"fingerprint": published(named, mode), "different": [], "unproven": []}
    once = ServedProof(Layout(model, all_columns=mode == "full"), mode)

    def result():
        received = Received(mode)
        assert len(list(received.watch(iter(named.items())))) == len(named)
        return once.result(received)

    assert result() == right
    packed["qkv"][-1, 3] += 1  # the last row is a value's
    assert result()["different"] == ["model.layers.0.self_attn.v_proj.weight"]
    packed["qkv"][-1, 3] = named["model.layers.0.self_attn.v_proj.weight"][-1, 3]
    assert result() == right
    packed["down"].mul_(2)
    assert result()["different"] == ["model.layers.0.mlp.down_proj.weight"]


def test_some_columns_of_a_wide_packed_weight_are_sampled():
    named = stand_ins.weights()
    wide = 5000
    for kind in ("gate", "up"):
        named[f"model.layers.0.mlp.{kind}_proj.weight"] = torch.randn(stand_ins.FFN, wide)
    model = stand_ins.model(named)
    asked = []
    kept = stand_ins.pack(model.model.layers[0].mlp.gate_up_proj)
    compute = model.model.layers[0].mlp.gate_up_proj.cpu_linear
    model.model.layers[0].mlp.gate_up_proj.cpu_linear = lambda x, *rest: (
        asked.append(len(x)) or compute(x, *rest)
    )
    assert proof(model, named, "sampled")["fingerprint"] == published(named, "sampled")
    kept.mul_(2)
    assert GATE in proof(model, named, "sampled")["different"]
    assert max(asked) <= 64 and len(asked) == 2, "one product for gate and up together"


def test_a_tied_head_that_computes_with_old_values_is_found():
    named = stand_ins.weights()
    model = stand_ins.model(named)
    kept = stand_ins.pack(model.lm_head)
    assert proof(model, named)["different"] == []
    kept[2, 2] += 1
    found = proof(model, named)
    assert found["different"] == [EMBEDDING] and found["fingerprint"] != published(named)


def test_layers_that_take_adapters_are_found_under_their_wrappers():
    named = stand_ins.weights()
    model = stand_ins.model(named)
    attention = model.model.layers[0].self_attn
    wrapper = nn.Module()
    wrapper.base_layer = attention.qkv_proj
    attention.qkv_proj = wrapper
    assert proof(model, named) == {"fingerprint": published(named), "different": [], "unproven": []}


def test_names_of_a_wrapped_model_are_mapped():
    named = stand_ins.weights()
    outer = nn.Module()
    inner = stand_ins.model(named)
    outer.language_model, outer.packed_modules_mapping = inner, inner.packed_modules_mapping
    outer.hf_to_vllm_mapper = type("Mapper", (), {"orig_to_new_prefix": {"model.": "language_model.model."}})
    assert proof(outer, named)["unproven"] == []


@pytest.mark.parametrize("kind", ["codes", "shuffled experts", "unknown"])
def test_what_cannot_be_located_is_counted_not_proven(kind):
    named = stand_ins.weights(experts=kind == "shuffled experts")
    model = stand_ins.model(named, experts=kind == "shuffled experts", backend="FLASHINFER_TRTLLM")
    wanted = [name for name in named if ".experts." in name]
    if kind == "codes":
        model.model.layers[0].self_attn.o_proj.quant_method = stand_ins.CodesMethod()
        wanted = ["model.layers.0.self_attn.o_proj.weight"]
    if kind == "unknown":
        wanted = ["model.vision.weight"]
        named["model.vision.weight"] = torch.ones(3)
    found = proof(model, named)
    assert found["unproven"] == sorted(wanted) and found["fingerprint"] == published(named)


EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("name", [Q, "model.norm.weight", GATE, EMBEDDING, EXPERT])
def test_a_parameter_that_nothing_was_sent_for_is_an_error(name):
    named = stand_ins.weights(experts=name == EXPERT)
    model = stand_ins.model(named, experts=name == EXPERT)
    del named[name]
    with pytest.raises(RuntimeError, match="1 parameters got no weights"):
        proof(model, named)


def test_a_tensor_of_another_shape_is_not_taken_for_proven():
    named = stand_ins.weights()
    model = stand_ins.model(named)
    named["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(stand_ins.HIDDEN, 5)
    assert proof(model, named)["unproven"] == ["model.layers.0.self_attn.o_proj.weight"]


def test_an_engine_of_another_type_is_compared_in_its_own():
    named = stand_ins.weights()
    model = stand_ins.model(named).to(torch.bfloat16)
    assert proof(model, named)["fingerprint"] == published(named)
    model.model.norm.weight[3] += 1
    found = proof(model, named)
    assert found["different"] == ["model.norm.weight"] and found["fingerprint"] != published(named)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", [False, True])
def test_a_bucket_taken_at_once_proves_what_its_tensors_prove_one_by_one(mode, change):
    named = stand_ins.weights()
    model = stand_ins.model(named)
    model.model.norm.weight[1] += change
    described = tuple(OfferedTensor(name, "float32", tuple(t.shape)) for name, t in named.items())
    received = Received(mode)
    for bucket in Offer("s", "h", 1, 1.0, 5000, described, None).buckets:
        buffer = torch.zeros(bucket_size(bucket), dtype=torch.uint8)
        for tensor, offset in bucket:
            view_of(buffer, tensor, offset).copy_(named[tensor.name])
        received.take(bucket, buffer)
        passing = [(tensor.name, view_of(buffer, tensor, offset)) for tensor, offset in bucket]
        assert len(list(received.watch(iter(passing)))) == len(bucket)
        buffer.zero_()  # as another bucket would
    found = ServedProof(Layout(model, all_columns=mode == "full"), mode).result(received)
    assert found == proof(model, named, mode)
    assert found["different"] == (["model.norm.weight"] if change else [])


def test_two_tensors_of_a_name_are_refused():
    with pytest.raises(ValueError, match="two tensors"):
        list(Received("full").watch(iter([("a", torch.ones(2)), ("a", torch.ones(2))])))


def test_received_values_outlive_the_buffer_they_came_in():
    buffer = torch.ones(4)
    received = Received("sampled")
    for _ in received.watch(iter([("a", buffer)])):
        buffer.zero_()
    assert received.values["a"].tolist() == [1.0] * 4


def test_tensors_of_several_types_are_fetched_in_order():
    tensors = [torch.ones(2), torch.zeros(3, dtype=torch.bfloat16), torch.full((1,), 2.0)]
    assert all(torch.equal(a, b) for a, b in zip(fetch(tensors), tensors, strict=True))


class Manager:
    """vLLM's table of the adapters in a worker: here two slots, ours in the second."""

    def __init__(self, model, matrices, scaling, rank=0, ranks=1):
        self.lora_index_to_id = [9, 1]
        qkv, down = nn.Module(), nn.Module()
        qkv.base_layer = model.model.layers[0].self_attn.qkv_proj
        down.base_layer = model.model.layers[0].mlp.down_proj
        part = stand_ins.part
        a, b = ([matrices[f"q.{m}"], matrices[f"k.{m}"], matrices[f"v.{m}"]] for m in "AB")
        b = [part(m, rank, ranks) * scaling for m in b]
        qkv.lora_a_stacked, qkv.lora_b_stacked = self.stacks(a, 0), self.stacks(b, 1)
        down.lora_a_stacked = self.stacks([part(matrices["down.A"], rank, ranks, 1)], 0)
        down.lora_b_stacked = self.stacks([matrices["down.B"] * scaling], 1)
        self.modules = {"model.layers.0.self_attn.qkv_proj": qkv, "model.layers.0.mlp.down_proj": down}

    @staticmethod
    def stacks(parts, rank_dim):
        """Slots with room for rank 5 in dimension `rank_dim`."""
        made = []
        for matrix in parts:
            size = list(matrix.shape)
            size[rank_dim] = 5
            stack = torch.full((2, 1, *size), 99.0)
            stack[1, 0, : matrix.shape[0], : matrix.shape[1]] = matrix
            made.append(stack)
        return tuple(made)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_read_from_its_slot(rslora, ranks):
    random = torch.Generator().manual_seed(2)
    sizes = {"q": (12, 8), "k": (6, 8), "v": (6, 8), "down": (8, 12)}
    matrices, named = {}, {}
    for key, (out, into) in sizes.items():
        matrices[f"{key}.A"] = torch.randn(3, into, generator=random)
        matrices[f"{key}.B"] = torch.randn(out, 3, generator=random)
        where = "mlp" if key == "down" else "self_attn"
        for m in "AB":
            name = f"base_model.model.model.layers.0.{where}.{key}_proj.lora_{m}.weight"
            named[name] = matrices[f"{key}.{m}"]
    config = {"r": 3, "lora_alpha": 7, "use_rslora": rslora}
    scaling = 7 / 3**0.5 if rslora else 7 / 3
    base = stand_ins.weights()
    for rank in range(ranks):
        model = stand_ins.model(base, rank, ranks)
        manager = Manager(model, matrices, scaling, rank, ranks)
        layout = AdapterLayout(model, manager, 1, config)
        found = proof(model, named, layout=layout)
        assert found == {"fingerprint": published(named), "different": [], "unproven": []}
        manager.modules["model.layers.0.self_attn.qkv_proj"].lora_b_stacked[1][1, 0, 0, 0] += 1
        found = proof(model, named, layout=layout)
        assert found["different"] == ["base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"]
        assert found["fingerprint"] != published(named)


def test_an_adapter_that_is_not_served_has_no_slot():
    model = stand_ins.model(stand_ins.weights())
    named = {"base_model.model.model.layers.0.mlp.down_proj.lora_A.weight": torch.ones(3, 12)}
    matrices = {f"{key}.{m}": torch.ones(3, 3) for key in ("q", "k", "v") for m in "AB"}
    matrices |= {"down.A": torch.ones(3, 12), "down.B": torch.ones(8, 3)}
    layout = AdapterLayout(model, Manager(model, matrices, 1.0), 4, {"r": 3, "lora_alpha": 3})
    with pytest.raises(ValueError, match="4 is not in list"):
        proof(model, named, layout=layout)
    elsewhere = {"base_model.model.model.vision.lora_A.weight": torch.ones(3, 12)}
    assert len(proof(model, elsewhere, layout=layout)["unproven"]) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_one_comparison_of_everything_finds_what_that_of_each_tensor_finds(rank, monkeypatch):
    """Each parameter changed at one place, to a neighbouring value or another zero."""
    named = stand_ins.weights()
    named["model.norm.weight"][0] = 0.0
    places = [name for name, _ in stand_ins.model(named, rank, 2).named_parameters()]
    for place in places:
        model = stand_ins.model(named, rank, 2)
        values = dict(model.named_parameters())[place].data.view(-1)
        values[0] = -0.0 if values[0] == 0 else torch.nextafter(values[0], torch.tensor(9.0))
        found = proof(model, named, "sampled")
        with monkeypatch.context() as patch:
            patch.setattr(_Known, "surely_same", lambda *_: False)
            assert found == proof(model, named, "sampled"), place
        assert len(found["different"]) == 1, place


def test_equal_values_are_not_compared_one_by_one(monkeypatch):
    named = stand_ins.weights()
    monkeypatch.setattr("prl.inference.vllm_proof._settle_all", None)
    assert proof(stand_ins.model(named), named, "sampled")["fingerprint"] == published(named, "sampled")


def test_values_of_several_types_are_compared_one_by_one():
    named = stand_ins.weights()
    model = stand_ins.model(named)
    model.model.norm.weight.data = named["model.norm.weight"].bfloat16()
    named = {**named, "model.norm.weight": named["model.norm.weight"].bfloat16()}
    assert proof(model, named, "sampled") == {
        "fingerprint": published(named, "sampled"),
        "different": [],
        "unproven": [],
    }
