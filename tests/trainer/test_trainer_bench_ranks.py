"""`prl bench trainer ranks=1,2`: one command, two groups of processes, the efficiency of the second."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from prl.bench import ranks, trainer
from prl.trainer.distributed import World

WAIT = "import time; time.sleep(600)"


def result(ranks: int, tok_s_rank: float, **more: Any) -> dict[str, Any]:
    case = {"model": "tiny", "seq_len": 64, "docs": 1, "micro_batches": 2, "engine": "deepspeed"}
    overrides = {"cluster.train_ranks": str(ranks), **more.pop("overrides", {})}
    return {**case, "ranks": ranks, "tok_s_rank": tok_s_rank, "peak_gib": 1.0, "overrides": overrides, **more}


def test_efficiency_is_beside_one_rank_of_the_same_case() -> None:
    other = {"overrides": {"zero": "3"}}
    found = [result(1, 100.0), result(1, 50.0, **other), result(2, 90.0), result(2, 20.0, **other)]
    found += [result(2, 70.0, seq_len=128), {**result(2, 0.0), "model": "x", "error": "no memory"}]
    del found[-1]["tok_s_rank"]
    ranks.compare(found)
    assert [r.get("efficiency") for r in found] == [1.0, 1.0, 0.9, 0.4, None, None]
    table = ranks.scaling_table(found)
    assert len(table) == 5 and "zero=3" in table[2] and "40.0 %" in table[4]


def test_one_command_measures_one_and_two_ranks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    words = ["seq_len=32", "steps=1", "micro_batches=1", "ranks=1,2", "zero=2"]
    assert trainer.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    one, two = json.loads((tmp_path / "out.json").read_text())
    assert (one["ranks"], two["ranks"]) == (1, 2) and (one["tokens"], two["tokens"]) == (32, 64)
    assert two["efficiency"] == pytest.approx(two["tok_s_rank"] / one["tok_s_rank"])
    assert two["tok_s"] == pytest.approx(2 * two["tok_s_rank"])
    assert one["loss"] != two["loss"], "the second rank has rows of its own"
    out = capfd.readouterr().out
    assert out.count("tiny 32 x 1 deepspeed") == 2 and "efficiency" in out


def test_a_rank_that_fails_ends_the_others() -> None:
    started = time.monotonic()
    code = ranks.start_ranks(lambda rank: [sys.executable, "-c", "exit(3)" if rank else WAIT], 2)
    assert code == 3 and time.monotonic() - started < 300


def test_ranks_learn_who_they_are_from_variables(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    tell = f"import os; print([os.environ[n] for n in {names!r}], file=open({str(tmp_path)!r}"
    assert ranks.start_ranks(lambda r: [sys.executable, "-c", f"{tell} + '/{r}', 'w'))"], 2) == 0
    for rank in "01":
        assert (tmp_path / rank).read_text() == f"['{rank}', '{rank}', '2', '127.0.0.1']\n"


def test_a_rank_of_a_group_measures_one_number_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert trainer.main(["ranks=1,2"]) == 2
    assert "a rank of a group already" in capsys.readouterr().err


def test_memory_that_is_short_is_a_row_of_one_rank_and_the_end_of_several() -> None:
    def measure(*_: Any) -> dict[str, Any]:
        raise torch.OutOfMemoryError("full")

    cpu = torch.device("cpu")
    assert trainer.tried(measure, None, None, World(0, 1, cpu)) == {"error": "out of memory"}
    with pytest.raises(torch.OutOfMemoryError):
        trainer.tried(measure, None, None, World(0, 2, cpu))


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_the_bare_engine_has_masters_of_every_optimizer(world: World, tmp_path: Path, optim: str) -> None:
    """In bfloat16 it steps float32 copies, which an optimizer must still know as matrices or not."""
    words = ["seq_len=32", "steps=1", "dtype=bfloat16", "engine=deepspeed,bare", f"optim={optim}"]
    assert trainer.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    with_engine, bare = json.loads((tmp_path / "out.json").read_text())
    assert with_engine["loss"] == pytest.approx(bare["loss"], abs=1e-4)
    assert with_engine["grad_norm"] == pytest.approx(bare["grad_norm"], rel=1e-3)
