"""The decoder computes what transformers computes, from the weights that it says it serves."""

import json
import shutil

import inference_models as lab
import pytest
import torch
from safetensors.torch import load_file, save_file

from prl.inference.dense_weights import TornWeights
from prl.sync.fingerprint import fingerprint
from prl.sync.weight_files import WeightFiles


def copy_of(directory, target, **config):
    """A copy of a model directory with other entries in its config.json."""
    shutil.copytree(directory, target)
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


@pytest.mark.parametrize("family", lab.FAMILIES)
def test_prefill_and_decode_equal_transformers(family, model_dirs):
    reference, model = lab.build(family), lab.decoder(model_dirs(family))
    cache = model.new_cache(4)
    ids = torch.randint(8, 264, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids).logits
    states = model.prefill(ids[:, :14], cache, 0, torch.arange(3))
    torch.testing.assert_close(model.logits(states), expected[:, :14], atol=5e-5, rtol=1e-4)
    for position in range(14, 20):
        states = model.decode(ids[:, position], torch.full((3,), position), cache)
        torch.testing.assert_close(model.logits(states), expected[:, position], atol=5e-5, rtol=1e-4)


def test_rows_of_different_lengths_do_not_touch_each_other(tiny_dir, tiny_model):
    model = lab.decoder(tiny_dir)
    cache = model.new_cache(4)
    cache.data.normal_()  # what earlier sequences left behind
    ids = torch.randint(8, 264, (3, 10), generator=torch.Generator().manual_seed(2))
    model.prefill(ids, cache, 0, torch.arange(3))
    lengths = torch.tensor([3, 10, 7])  # the rest of each row was padding
    tokens = torch.tensor([9, 10, 11])
    logits = model.logits(model.decode(tokens, lengths, cache))
    for row in range(3):
        sequence = torch.cat((ids[row, : lengths[row]], tokens[row : row + 1]))
        with torch.no_grad():
            expected = tiny_model(sequence[None]).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=5e-5, rtol=1e-4)


def test_one_prompt_can_fill_several_slots(tiny_dir):
    model = lab.decoder(tiny_dir)
    cache = model.new_cache(5)
    ids = torch.randint(8, 264, (2, 6))
    model.prefill(ids, cache, 1, torch.tensor([0, 1, 0]))
    assert torch.equal(cache.data[:, :, 1], cache.data[:, :, 3])
    assert not torch.equal(cache.data[:, :, 1], cache.data[:, :, 2])
    assert not cache.data[:, :, [0, 4]].any()


def test_bfloat16_is_close(tiny_dir, tiny_model):
    model = lab.decoder(tiny_dir, dtype=torch.bfloat16)
    ids = torch.randint(8, 264, (1, 12), generator=torch.Generator().manual_seed(3))
    logits = model.logits(model.prefill(ids, model.new_cache(1), 0, torch.arange(1)))
    with torch.no_grad():
        expected = tiny_model(ids).logits
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_untied_biased", "llama"])
def test_named_weights_are_those_of_transformers(family, model_dirs):
    served = dict(lab.decoder(model_dirs(family)).weights.named_weights())
    expected = dict(lab.build(family).named_parameters())
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[name], expected[name]) for name in expected)


def test_named_weights_are_the_memory_that_computes(tiny_dir):
    model = lab.decoder(tiny_dir)
    ids = torch.randint(8, 264, (1, 5))

    def logits():
        return model.logits(model.prefill(ids, model.new_cache(1), 0, torch.arange(1)))

    for name, view in model.weights.named_weights():
        before, kept = logits(), view.clone()
        view.mul_(1.5)
        assert not torch.equal(logits(), before), name
        view.copy_(kept)


def test_weights_are_replaced_in_place(tiny_dir, tmp_path):
    model = lab.decoder(tiny_dir)
    addresses = {name: view.data_ptr() for name, view in model.weights.named_weights()}
    other = lab.build("qwen3", seed=1)
    lab.save(other, tmp_path)
    model.weights.load(tmp_path, strict=True)
    served = dict(model.weights.named_weights())
    assert {name: view.data_ptr() for name, view in served.items()} == addresses
    assert fingerprint(served.items(), "full") == fingerprint(other.named_parameters(), "full")


def change_file(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (lambda t: t.update({"extra": torch.ones(1)}), "extra is not a weight of this model"),
        (lambda t: t.update({"lm_head.weight": torch.ones(264, 32)}), r"lm_head\.weight is not a weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), r"is \[5\], the model's is \[32\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32).half()}), "the engine serves torch.float32"),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(change, message, tiny_dir, tmp_path):
    model = lab.decoder(tiny_dir)
    before = fingerprint(model.weights.named_weights(), "full")
    broken = lab.save(lab.build("qwen3", seed=1), tmp_path / "broken")
    change_file(broken, change)
    with pytest.raises(ValueError, match=message):
        model.weights.load(broken, strict=True)
    assert fingerprint(model.weights.named_weights(), "full") == before


def test_many_faults_are_summed_up(tiny_dir, tmp_path):
    broken = copy_of(tiny_dir, tmp_path / "broken")
    change_file(broken, lambda t: [t.pop(name) for name in list(t) if "layers.1" in name])
    with pytest.raises(ValueError, match=r"and 6 more"):
        lab.decoder(broken)


def test_a_model_directory_may_hold_more(tiny_dir, tmp_path):
    directory = copy_of(tiny_dir, tmp_path / "more")
    extra = {"lm_head.weight": torch.ones(264, 32), "model.rotary_emb.inv_freq": torch.ones(6)}
    change_file(directory, lambda t: t.update(extra))
    served = dict(lab.decoder(directory).weights.named_weights())
    assert "lm_head.weight" not in served


def test_a_model_directory_is_cast(tiny_dir, tmp_path):
    directory = lab.save(lab.build("qwen3").half(), tmp_path / "half")
    served = dict(lab.decoder(directory).weights.named_weights())
    expected = dict(lab.build("qwen3").half().float().named_parameters())
    assert all(torch.equal(served[name], expected[name]) for name in expected)


def test_loading_that_breaks_off_is_not_hidden(tiny_dir, monkeypatch):
    model = lab.decoder(tiny_dir)
    real = WeightFiles.tensors

    def break_off(self):
        yield next(real(self))
        raise OSError("the disk is gone")

    monkeypatch.setattr(WeightFiles, "tensors", break_off)
    with pytest.raises(TornWeights, match="the disk is gone"):
        model.weights.load(tiny_dir, strict=True)


def test_first_layers_only(tiny_dir, tiny_model):
    model = lab.decoder(tiny_dir, num_layers=1)
    tiny_model.model.layers = tiny_model.model.layers[:1]
    tiny_model.config.num_hidden_layers = 1
    ids = torch.randint(8, 264, (1, 9))
    logits = model.logits(model.prefill(ids, model.new_cache(1), 0, torch.arange(1)))
    with torch.no_grad():
        torch.testing.assert_close(logits, tiny_model(ids).logits, atol=5e-5, rtol=1e-4)


def test_random_weights_need_no_file(tiny_dir, tmp_path):
    shutil.copy(tiny_dir / "config.json", tmp_path / "config.json")
    model = lab.decoder(tmp_path, random_init=True)
    served = dict(model.weights.named_weights())
    assert torch.equal(served["model.norm.weight"], torch.ones(32))
    assert 0.015 < served["model.embed_tokens.weight"].std() < 0.025
    with pytest.raises(FileNotFoundError):
        lab.decoder(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, r"architecture Qwen3MoeForCausalLM \(served: Qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}, "sliding_window=16"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(config, reason, tiny_dir, tmp_path):
    directory = copy_of(tiny_dir, tmp_path / "other", **config)
    with pytest.raises(ValueError, match=reason):
        lab.decoder(directory)


def test_all_reasons_are_listed_together(tiny_dir, tmp_path):
    directory = copy_of(tiny_dir, tmp_path / "other", hidden_act="relu", mlp_bias=True)
    with pytest.raises(ValueError, match="hidden_act=relu; mlp_bias=true"):
        lab.decoder(directory)


def test_a_context_beyond_the_model_is_refused(tiny_dir):
    with pytest.raises(ValueError, match=r"inference\.max_model_len=200.*is 128"):
        lab.decoder(tiny_dir, max_length=200)


def test_end_tokens_come_from_both_configs_and_sampling_from_neither(tiny_dir, tmp_path):
    directory = copy_of(tiny_dir, tmp_path / "other", eos_token_id=[2, 7])
    generation = {"eos_token_id": 9, "top_k": 20, "temperature": 0.6}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    assert lab.decoder(directory).config.eos_token_ids == (2, 7, 9)


def test_old_style_rope_settings_are_read(model_dirs, tmp_path):
    directory = copy_of(model_dirs("llama"), tmp_path / "old", rope_scaling=None, rope_theta=5000.0)
    file = directory / "config.json"
    raw = json.loads(file.read_text())
    del raw["rope_parameters"]
    file.write_text(json.dumps(raw))
    assert lab.decoder(directory).config.rope == {"rope_type": "default", "rope_theta": 5000.0}
