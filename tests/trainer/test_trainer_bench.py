"""`prl bench trainer` and `prl bench ckpt`: the arithmetic, the words, and one real run of each."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from prl.bench import ckpt, trainer
from prl.bench.fake_rows import fake_row
from prl.bench.phases import Phases
from prl.bench.shapes import SHAPES, shape_names, write_shape
from prl.orchestrator.packing import check_row
from prl.trainer.distributed import World
from prl.trainer.flops import model_cost, peak_flops, training_flops


def config_of(name: str, directory: Path):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(write_shape(name, directory))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3_0_6b", 0.596),
        ("qwen3_1_7b", 1.72),
        ("qwen3_4b", 4.02),
        ("qwen3_8b", 7.57),
        ("qwen3_30b_a3b", 3.04),
    ],
)
def test_shapes_have_their_published_sizes(name: str, billions: float, tmp_path: Path) -> None:
    """Matrix parameters that a token meets, output layer included, an untied input embedding not."""
    assert model_cost(config_of(name, tmp_path)).alpha / 2 == pytest.approx(billions * 1e9, rel=0.01)


def test_flops_follow_the_printed_formula(tmp_path: Path) -> None:
    config = config_of("qwen3_0_6b", tmp_path)
    h, layers, heads, kv, width, ffn = 1024, 28, 16, 8, 128, 3072
    matrices = layers * (h * width * (2 * heads + 2 * kv) + 3 * h * ffn) + h * 151936
    for lengths in ([4096], [1000, 96, 3000]):
        expected = sum(n * (6 * matrices + 12 * layers * heads * width * n / 2) for n in lengths)
        assert training_flops(model_cost(config), [lengths]) == pytest.approx(expected)
    assert training_flops(model_cost(config), [[8], [8]]) == 2 * training_flops(model_cost(config), [[8]])


def test_peaks_are_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_flops(torch.device("cpu")) is None
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("Tesla T4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(torch.device("cuda")) == peak


def test_rows_are_whole_and_every_token_but_the_first_counts() -> None:
    row = fake_row(20, 3, 50, seed=1)
    check_row(row)
    assert row.sequence_lengths == [7, 7, 6] and sum(row.loss_mask) == 17
    assert row.position_ids[7] == 0 and not row.loss_mask[7]
    assert max(row.input_ids) < 50 and fake_row(20, 3, 50, seed=2).input_ids != row.input_ids
    with pytest.raises(ValueError, match="docs=3"):
        fake_row(5, 3, 50, seed=0)


def test_commas_make_every_combination() -> None:
    cases = trainer.read_cases(["seq_len=64,128", "recompute=none,full", "zero=3", "env=[reverse_text]"])
    assert [(c.seq_len, c.overrides["trainer.recompute"]) for c in cases] == [
        (64, "none"),
        (64, "full"),
        (128, "none"),
        (128, "full"),
    ]
    assert all(c.overrides["zero"] == "3" and c.overrides["env"] == "[reverse_text]" for c in cases)
    assert cases[1].label.startswith("deepspeed recompute=full")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seq_len"], "no word=value"),
        (["steps=0"], "steps=0: a number of at least 1"),
        (["engine=fsdp"], "engine=fsdp: choose deepspeed or bare"),
        (["model=gpt9"], "model=gpt9: no such shape"),
        (["recompute=some"], "trainer.recompute"),
        (["ranks=2", "engine=deepspeed,bare"], "engine=bare knows no other ranks"),
        (["sequence_parallel=1,2", "ranks=2"], "sequence_parallel=: one number"),
    ],
)
def test_bad_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainer.main(words) == 2
    assert message in capsys.readouterr().err


def test_both_engines_do_the_same_step(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["seq_len=48", "docs=3", "steps=1", "engine=deepspeed,bare", "--json", str(tmp_path / "out.json")]
    assert trainer.main(words) == 0
    with_engine, bare = json.loads((tmp_path / "out.json").read_text())
    assert with_engine["loss"] == pytest.approx(bare["loss"], abs=1e-6)
    assert with_engine["grad_norm"] == pytest.approx(bare["grad_norm"], rel=1e-4)
    assert with_engine["tokens"] == 96 and with_engine["tok_s"] == pytest.approx(96 / with_engine["step_s"])
    for result in (with_engine, bare):
        phases = result["phases"]
        assert sum(phases.values()) == pytest.approx(result["step_s"], rel=0.5)
        assert all(phases[name] > 0 for name in ("forward", "head", "backward", "optimizer"))
    out = capsys.readouterr().out
    assert "6 * matmul parameters" in out and out.count("tiny 48 x 2") == 2


def test_phases_are_those_of_their_calls(world: World) -> None:
    class Engine:
        def __init__(self) -> None:
            self.model = torch.nn.Module()
            self.model.base_model, self.head = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
            self.model.get_output_embeddings = lambda: self.head

        def backward(self, _: object) -> None:
            self.model.base_model(torch.ones(1))  # recomputation is not forward
            time.sleep(0.05)

        def step(self, _: int) -> str:
            return "stepped"

    engine = Engine()
    phases = Phases(engine, torch.device("cpu"))
    phases.clear()
    engine.model.base_model(torch.ones(1))
    engine.backward(None)
    assert engine.step(1) == "stepped"
    phases.close_step(keep=True)
    found = phases.mean()
    assert found["backward"] >= 0.05 and found["head"] == 0.0 and found["forward"] > 0
    assert phases._marks[0][0] == "forward" and len(phases._marks) == 3


def test_checkpoints_are_timed(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ckpt.main([f"dir={tmp_path}", "--json", str(tmp_path / "out.json")]) == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert list(results)[:3] == ["save", "save again", "load"]
    assert results["save"]["bytes"] == results["copy of the files"]["bytes"] > 3 * 4 * 180_000
    assert all(r["mb_s"] == pytest.approx(r["bytes"] / 1e6 / r["seconds"]) for r in results.values())
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert "export bfloat16" in capsys.readouterr().out
    assert ckpt.main(["model=gpt9"]) == 2 and "no such shape" in capsys.readouterr().err


def test_every_shape_is_listed() -> None:
    assert set(shape_names()) == {"tiny", *SHAPES}
    assert "qwen3_4b" in trainer.USAGE and "qwen3_4b" in ckpt.USAGE
