"""Token statistics: moments that merge, NaN that marks absence, names that are reported."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prl.trainer import stats
from prl.trainer.distributed import World
from prl.trainer.stats import TOTAL_LOSS, TokenStats, named_statistics

ALONE = World(0, 1, torch.device("cpu"))


def reduce(collected: TokenStats) -> dict[str, float]:
    return named_statistics(collected.reduce(ALONE))


@given(st.lists(st.lists(st.floats(-50, 50, width=32), max_size=6), min_size=1, max_size=5))
def test_rows_merge_into_the_statistics_of_all_tokens(rows: list[list[float]]) -> None:
    collected = TokenStats()
    for row in rows:
        collected.add("nll", torch.tensor([*row, math.nan]))
    values = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
    found = reduce(collected)
    if not len(values):
        assert found == {}
        return
    assert found["nll/mean"] == pytest.approx(float(values.mean()), abs=1e-9)
    assert found["nll/std"] == pytest.approx(float(values.std(correction=0)), abs=1e-5)
    assert (found["nll/min"], found["nll/max"]) == (float(values.min()), float(values.max()))


def test_ranks_with_different_keys_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without a key joins the same collective: there is only one, for all keys."""
    first, second = TokenStats(), TokenStats()
    first.add("entropy/all", torch.tensor([1.0, 3.0]))
    first.add("entropy/a", torch.tensor([1.0, 3.0]))
    second.add("entropy/all", torch.tensor([8.0]))
    second.add("entropy/b", torch.tensor([8.0]))
    calls = []

    def gather(value: object, world: World) -> list[object]:
        calls.append(value)
        return [first._local(), second._local()]

    monkeypatch.setattr(stats, "all_gather_json", gather)
    found = reduce(second)
    assert len(calls) == 1
    assert found["entropy/all/mean"] == 4.0 and found["entropy/all/max"] == 8.0
    assert found["entropy/a/mean"] == 2.0 and found["entropy/b/mean"] == 8.0


def test_a_rank_without_any_token_reduces_to_nothing() -> None:
    collected = TokenStats()
    assert reduce(collected) == {}
    collected.add("mismatch_kl/all", torch.tensor([]))
    assert reduce(collected) == {}


def test_only_the_reported_statistics_are_named() -> None:
    collected = TokenStats()
    names = [
        "entropy/env",
        "mismatch_kl/all",
        "is_masked",
        "ref_kl/masked_mismatch_kl",
        "is_clipped",
        "ref_kl",
        "loss",
        TOTAL_LOSS,
    ]
    for name in names:
        collected.add(name, torch.tensor([1.0, 2.0]))
    found = reduce(collected)
    statistics = {n: {key.rpartition("/")[2] for key in found if key.rpartition("/")[0] == n} for n in names}
    assert statistics["entropy/env"] == statistics["mismatch_kl/all"] == {"mean", "std", "max"}
    assert statistics["is_masked"] == statistics["ref_kl/masked_mismatch_kl"] == {"mean", "max"}
    assert statistics["loss"] == {"median", "std", "min", "max"} and statistics[TOTAL_LOSS] == set()
    assert statistics["is_clipped"] == statistics["ref_kl"] == {"mean", "median", "std", "min", "max"}


def test_kl_entropy_ratio_needs_entropy() -> None:
    collected = TokenStats()
    collected.add("mismatch_kl/all", torch.tensor([0.2]))
    assert "kl_ent_ratio/mean" not in reduce(collected)
    collected.add("entropy/all", torch.tensor([0.0]))
    assert "kl_ent_ratio/mean" not in reduce(collected)
    collected.add("entropy/all", torch.tensor([0.8]))
    assert reduce(collected)["kl_ent_ratio/mean"] == pytest.approx(0.5)
