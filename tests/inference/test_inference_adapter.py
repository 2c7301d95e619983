"""Adapters in the embedded engine: merged from the base each time, refused when more than A and B."""

import json

import inference_models as lab
import pytest
import torch
from exactness import FullPolicy, LoraPolicy

from prl.config.serving import SyncConfig
from prl.inference.adapter import adapter_scaling
from prl.sync.filesystem import FilesystemPublisher
from prl.sync.fingerprint import fingerprint

PLAIN = {"r": 4, "lora_alpha": 12}


@pytest.fixture
def publisher(tmp_path):
    return FilesystemPublisher(tmp_path / "broadcasts", SyncConfig(fingerprint="full"))


def apply(engine, publisher, version, policy):
    record = publisher.publish(version, policy.tensors(), policy.adapter)
    return record, engine.update_weights(publisher.broadcasts / f"step_{version}", version, "full")


def merged(base, adapter, scaling):
    """W + s·B·A in float64, by name; independent of the engine."""
    result = {name: tensor.double() for name, tensor in base.items()}
    for name, part_a in adapter.items():
        if ".lora_A." in name:
            part_b = adapter[name.replace(".lora_A.", ".lora_B.")]
            target = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            result[target] = result[target] + scaling * part_b.double() @ part_a.double()
    return result


def test_the_served_weights_are_base_plus_scaled_product(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir)
    base = {name: tensor.clone() for name, tensor in engine.model.weights.named_weights()}
    policy = LoraPolicy(tiny_dir)
    for version in (1, 2, 3):  # each from the base, not from the version before
        policy.change()
        record, served = apply(engine, publisher, version, policy)
        assert served == record.fingerprint == fingerprint(policy.tensors(), "full")
        expected = merged(base, dict(policy.tensors()), 12 / 4)
        for name, tensor in engine.model.weights.named_weights():
            assert torch.allclose(tensor.double(), expected[name], atol=1e-6), name


def test_whole_weights_after_an_adapter_replace_it(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir)
    policy = LoraPolicy(tiny_dir)
    policy.change()
    apply(engine, publisher, 1, policy)
    full = FullPolicy(tiny_dir)
    full.change()
    record, served = apply(engine, publisher, 2, full)
    assert served == record.fingerprint
    policy.change()
    apply(engine, publisher, 3, policy)
    expected = merged(dict(full.tensors()), dict(policy.tensors()), 3.0)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.allclose(engine.model.weights.named[name].double(), expected[name], atol=1e-6)


def test_a_foreign_adapter_is_refused_and_changes_nothing(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir)
    before = engine.fingerprint("full")
    cases = {
        "is not an adapted weight": {"base_model.model.other.lora_A.weight": torch.ones(4, 2)},
        r"adapts \[5, 32\]": {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 32),
            "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": torch.ones(5, 4),
        },
    }
    for version, (reason, tensors) in enumerate(cases.items(), start=1):
        publisher.publish(version, tensors.items(), PLAIN)
        with pytest.raises(ValueError, match=reason):
            engine.update_weights(publisher.broadcasts / f"step_{version}", version, "full")
    assert (engine.version, engine.fingerprint("full")) == (0, before)


def test_scaling_and_what_is_not_served():
    assert adapter_scaling(PLAIN) == 3.0
    assert adapter_scaling({**PLAIN, "use_rslora": True}) == 6.0
    neutral = {"bias": "none", "use_dora": False, "modules_to_save": None, "rank_pattern": {}}
    assert adapter_scaling({**PLAIN, **neutral}) == 3.0
    for key, value in {
        "bias": "all",
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "rank_pattern": {"q": 2},
    }.items():
        with pytest.raises(ValueError, match=key):
            adapter_scaling({**PLAIN, key: value})


def test_peft_reads_what_is_published(tiny_dir, publisher):
    import peft

    policy = LoraPolicy(tiny_dir)
    policy.change()
    record = publisher.publish(1, policy.tensors(), policy.adapter)
    assert json.loads((publisher.broadcasts / "step_1" / "adapter_config.json").read_text())["r"] == 4
    loaded = peft.PeftModel.from_pretrained(FullPolicy(tiny_dir).model, record.path)
    ids = torch.tensor([[4, 20, 30]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, policy.model(ids).logits)
