"""Export: bit-exact in `from_pretrained`, in files of a bounded size, from what the user names."""

from __future__ import annotations

import json
import re
import weakref
from typing import ClassVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ranks import tiny_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import prl.checkpoint.export as exporting
from prl.assets import bundled_model
from prl.checkpoint.export import export, plan_shards, run
from prl.checkpoint.export_source import locate
from prl.checkpoint.marker import mark_complete, step_dir
from prl.checkpoint.model_files import adapt_config
from prl.config.load import dump_resolved
from prl.config.schema import ExportConfig, SftConfig
from prl.config.serving import TrackingConfig
from prl.config.sft import WarmStartDataConfig
from prl.config.training import AdamWConfig, CkptConfig, ModelConfig, SchedulerConfig

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_model(directory, model, **more):
    """A complete checkpoint `directory` of the parameters of `model`, as a trainer would write it."""
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    state |= {f"optim.exp_avg.{name}": torch.ones_like(p) for name, p in model.named_parameters()}
    dcp.save(state | more, checkpoint_id=directory / "trainer", no_dist=True)
    mark_complete(directory, ["trainer"])
    return directory


def model_directory(directory, model):
    """The small files of a model directory, one weight file, and a document."""
    directory.mkdir()
    model.config.save_pretrained(directory)
    (directory / "model.safetensors").write_bytes(b"old weights")
    (directory / "model.safetensors.index.json").write_text("{}")
    (directory / "README.md").write_text("of the old model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (directory / name).write_bytes((bundled_model("tiny") / name).read_bytes())
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    return directory


def assert_same_weights(path, model, dtype):
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    expected = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert next(loaded.parameters()).dtype == dtype


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [10**9, 3000], ids=["one file", "several files"])
def test_from_pretrained_is_bit_exact(tmp_path, tied, dtype, shard_bytes):
    model = tiny_model(seed=3, tied=tied)
    source = model_directory(tmp_path / "source", model)
    step = save_model(step_dir(tmp_path, 4), model)
    exported = export(step, tmp_path / "out", dtype, shard_bytes, source)
    assert_same_weights(tmp_path / "out", model, dtype)

    files = sorted((tmp_path / "out").glob("*.safetensors"))
    names = [name for file in files for name in load_file(file)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert ("lm_head.weight" in names) == (not tied)
    assert exported.num_files == len(files) and (len(files) > 1) == (shard_bytes == 3000)
    assert exported.num_bytes == sum(p.numel() for p in model.parameters()) * dtype.itemsize
    assert all(file.stat().st_size < max(shard_bytes, 61 * 20 * dtype.itemsize) + 2000 for file in files)


@pytest.mark.parametrize("merged", [False, True])
def test_no_more_than_one_file_is_in_memory(tmp_path, monkeypatch, merged):
    """Tensors of the files before are gone when the next file is written, and sources read nothing ahead."""
    model = tiny_model(seed=3, tied=False)
    source, step = model_directory(tmp_path / "source", model), save_model(step_dir(tmp_path, 4), model)
    if merged:
        (source / "model.safetensors.index.json").unlink()
        model.save_pretrained(source)
        monkeypatch.setattr(exporting, "saved_adapter", lambda _: {"lora_alpha": 1.0, "r": 1})
        monkeypatch.setattr(exporting, "AdapterWeights", lambda _: NoAdapters())
    alive, written, save = [], [], exporting._save

    def watch(tensors, file):
        assert not [ref for ref in alive if ref() is not None], "tensors of an earlier file"
        alive.extend(weakref.ref(tensor) for tensor in tensors.values())
        written.append(sum(tensor.nbytes for tensor in tensors.values()))
        save(tensors, file)

    monkeypatch.setattr(exporting, "_save", watch)
    largest = max(p.numel() * 4 for p in model.parameters())
    export(step, tmp_path / "out", torch.float32, 3000, source)
    assert len(written) > 3 and max(written) <= max(3000, largest)


class NoAdapters:
    specs: ClassVar[dict] = {}

    def whole(self):
        return {}

    def read(self, dtypes):
        assert not dtypes
        return {}


def test_files_of_an_export(tmp_path):
    model = tiny_model(seed=0)
    source = model_directory(tmp_path / "source", model)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("x")
    export(save_model(step_dir(tmp_path, 4), model), tmp_path / "out", torch.bfloat16, 4000, source)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    shards = [name for name in names if name.endswith(".safetensors")]
    assert [name for name in names if name not in shards] == [
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(p.numel() for p in model.parameters()) * 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5]) == "<|assistant|>"
    assert not list(tmp_path.glob(".out*"))


def test_a_directory_in_use_is_not_overwritten(tmp_path):
    model = tiny_model(seed=0)
    source, step = model_directory(tmp_path / "source", model), save_model(step_dir(tmp_path, 4), model)
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "left over").write_text("of an export that was killed")
    export(step, out, torch.float32, 10**9, source)
    assert not (out / "left over").exists()
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="exists and is not empty: remove it or choose another out="):
        export(step, out, torch.bfloat16, 10**9, source)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="exists and is not empty"):
        export(step, tmp_path / "file", torch.bfloat16, 10**9, source)
    assert (out / "model.safetensors").read_bytes() == before


def test_a_failed_export_leaves_no_result(tmp_path):
    model = tiny_model(seed=0)
    step = save_model(step_dir(tmp_path, 4), model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no config\.json"):
        export(step, tmp_path / "out", torch.float32, 10**9, tmp_path / "empty")
    assert not (tmp_path / "out").exists()


def test_integer_buffers_keep_their_type(tmp_path):
    model = tiny_model(seed=0)
    more = {"model.counts": torch.arange(3), "model.bias": torch.ones(2)}
    step = save_model(step_dir(tmp_path, 4), model, **more)
    export(step, tmp_path / "out", torch.bfloat16, 10**9, model_directory(tmp_path / "source", model))
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.get_tensor("counts").dtype == torch.int64
        assert file.get_tensor("bias").dtype == torch.bfloat16


def test_plan_shards():
    sizes = {"layers.10.w": 40, "layers.2.w": 30, "embed": 50, "layers.2.a": 30, "norm": 200}
    order = ["embed", "layers.2.a", "layers.2.w", "layers.10.w", "norm"]
    assert list(plan_shards(sizes, 10**6)) == [order]
    assert list(plan_shards(sizes, 110)) == [order[:3], order[3:4], order[4:]]
    assert list(plan_shards(sizes, 1)) == [[name] for name in order]


def test_adapt_config():
    config = {"torch_dtype": "float32", "num_hidden_layers": 4, "layer_types": list("abcd"), "x": 1}
    assert adapt_config(config, "bfloat16", None) == {
        "dtype": "bfloat16",
        "num_hidden_layers": 4,
        "layer_types": list("abcd"),
        "x": 1,
    }
    assert adapt_config(config, "float32", 2) == {
        "dtype": "float32",
        "num_hidden_layers": 2,
        "layer_types": list("ab"),
        "x": 1,
    }
    nested = adapt_config({"text_config": {"num_hidden_layers": 4}, "vision_config": {}}, "float16", 3)
    assert nested["text_config"] == {"num_hidden_layers": 3, "dtype": "float16"}
    assert nested["vision_config"] == {} and "num_hidden_layers" not in nested


def make_run(path, steps=(3, 6), model_path=None, ckpt_dir=None, attempts=(1,), num_layers=None):
    """A run directory with checkpoints of the bundled model."""
    for attempt in attempts:
        config = SftConfig(
            data=WarmStartDataConfig(),
            model=ModelConfig(name="tiny", path=model_path, num_layers=num_layers),
            optim=AdamWConfig(),
            scheduler=SchedulerConfig(),
            tracking=TrackingConfig(name="none"),
            ckpt=CkptConfig(dir=ckpt_dir and str(ckpt_dir)),
        )
        directory = path / "configs" / f"attempt_{attempt}"
        directory.mkdir(parents=True)
        (directory / "resolved.yaml").write_text(dump_resolved("sft", config))
    model = AutoModelForCausalLM.from_pretrained(bundled_model("tiny"))
    for step in steps:
        save_model(step_dir(ckpt_dir or path / "checkpoints", step), model)
    return path


def test_what_is_exported(tmp_path):
    path = make_run(tmp_path / "run")
    checkpoints = path / "checkpoints"
    (checkpoints / "step_9" / "trainer").mkdir(parents=True)
    assert locate(str(path), None).step_dir == checkpoints / "step_6"
    assert locate(str(path), 3).step_dir == checkpoints / "step_3"
    for name in ("step_3", "step_3/trainer"):
        source = locate(str(checkpoints / name), None)
        assert (source.step_dir, source.model) == (checkpoints / "step_3", bundled_model("tiny"))


def test_checkpoints_elsewhere_and_the_newest_attempt(tmp_path):
    make_run(tmp_path / "run", ckpt_dir=tmp_path / "big", attempts=(9,), model_path="/gone")
    make_run(tmp_path / "run", ckpt_dir=tmp_path / "big", attempts=(10,), steps=(), num_layers=1)
    source = locate(str(tmp_path / "run"), None)
    assert (source.step_dir, source.num_layers) == (tmp_path / "big" / "step_6", 1)
    with pytest.raises(
        ValueError, match=r"no configs/attempt_n/resolved\.yaml.*give run=<run directory> step="
    ):
        locate(str(tmp_path / "big" / "step_6"), None)


@pytest.mark.parametrize(
    ("name", "step", "message"),
    [
        ("nowhere", None, "there is no directory"),
        ("run", 4, "no complete checkpoint of step 4 .* complete steps: 3, 6; not complete: 9"),
        ("run", 9, "no file COMPLETE"),
        ("run/checkpoints/step_3", 6, "is not the checkpoint of step=6"),
        ("run/checkpoints/step_9", None, "neither a run directory nor a complete checkpoint"),
        ("run/checkpoints", None, "neither a run directory nor a complete checkpoint"),
    ],
)
def test_what_cannot_be_exported(tmp_path, capsys, name, step, message):
    make_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step_9" / "trainer").mkdir(parents=True)
    capsys.readouterr()
    assert run(ExportConfig(run=str(tmp_path / name), step=step)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert re.match(f"export: .*{message}", captured.err)


def test_the_command(tmp_path, capsys):
    path = make_run(tmp_path / "run")
    capsys.readouterr()
    assert run(ExportConfig(run=str(path), dtype="bfloat16")) == 0
    out = path / "checkpoints" / "step_6" / "weights"
    assert re.match(rf"wrote {out}: 0\.4 MB in 1 safetensors file\(s\), .* MB/s\n", capsys.readouterr().out)
    assert_same_weights(out, AutoModelForCausalLM.from_pretrained(bundled_model("tiny")), torch.bfloat16)
    assert locate(str(path), None).step_dir == out.parent, "an export inside it leaves a checkpoint complete"
    assert run(ExportConfig(run=str(path))) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert run(ExportConfig(run=str(path), step=3, out=str(tmp_path / "deep" / "out"))) == 0
    assert (tmp_path / "deep" / "out" / "tokenizer.json").is_file()


def test_layers_that_were_not_trained_are_not_claimed(tmp_path):
    model = tiny_model(seed=0)
    source = model_directory(tmp_path / "source", model)
    model.model.layers = model.model.layers[:1]
    step = save_model(step_dir(tmp_path, 4), model)
    export(step, tmp_path / "out", torch.float32, 10**9, source, num_layers=1)
    assert_same_weights(tmp_path / "out", model, torch.float32)
