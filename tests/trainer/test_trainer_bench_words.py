"""Words of the benchmarks, and what a case leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prl.bench.trainer import tried
from prl.bench.words import combinations, count, split_options, write_results

OWN = {"model": "tiny", "steps": "4"}


def test_options_come_before_words_or_after(capsys: pytest.CaptureFixture[str]) -> None:
    assert split_options("bench x", "how", ["a=1", "--json", "out.json", "b=2"]) == (
        Path("out.json"),
        ["a=1", "b=2"],
    )
    assert split_options("bench x", "how", []) == (None, [])
    assert split_options("bench x", "how", ["a=1", "-h"]) is None
    assert capsys.readouterr().out == "how\n"


def test_values_are_combined_and_lists_stay_whole() -> None:
    found = list(combinations(["steps=1,2", "zero=0,3", "env=[a,b]"], OWN))
    assert [(case["steps"], case["zero"]) for case in found] == [
        ("1", "0"),
        ("1", "3"),
        ("2", "0"),
        ("2", "3"),
    ]
    assert all(case["model"] == "tiny" and case["env"] == "[a,b]" for case in found)
    for word in ("steps", "steps=", "=3"):
        with pytest.raises(ValueError, match="no word=value"):
            list(combinations([word], OWN))


def test_counts_are_whole_and_positive() -> None:
    assert count("steps", "12") == 12
    for value in ("0", "-1", "1.5", "many"):
        with pytest.raises(ValueError, match=f"steps={value}: a number of at least 1"):
            count("steps", value)


def test_results_are_written_where_asked(tmp_path: Path) -> None:
    write_results(None, [1])
    write_results(tmp_path / "r.json", [{"tok_s": 1.5}])
    assert json.loads((tmp_path / "r.json").read_text()) == [{"tok_s": 1.5}]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_case_that_does_not_fit_is_a_row_not_the_end() -> None:
    def measure(case: str, config: Any, world: Any) -> dict[str, Any]:
        if case == "large":
            raise torch.OutOfMemoryError("no room")
        return {"case": case}

    alone, two = (SimpleNamespace(device=torch.device("cpu"), size=size) for size in (1, 2))
    assert tried(measure, "large", None, alone) == {"error": "out of memory"}
    assert tried(measure, "small", None, alone) == {"case": "small"}
    with pytest.raises(torch.OutOfMemoryError, match="no room"):  # the other rank waits for this one
        tried(measure, "large", None, two)
