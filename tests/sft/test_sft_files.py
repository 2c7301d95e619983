"""Every kind of file and folder gives the same rows; the shipped data is what its maker makes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prl.assets import ROOT
from prl.config.sft import RowsDataConfig
from prl.sft.files import bundled_data, open_rows

ROWS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(5)]


def opened(
    path: Path | str, subset: str | None = None, split: str | None = None, **fields: Any
) -> list[dict]:
    rows = open_rows(RowsDataConfig(path=str(path), **fields), subset, split)
    return [rows[i] for i in range(len(rows))]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_json_lines_with_blank_lines_and_without_a_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + "\n\n".join(json.dumps(row) for row in ROWS))
    assert opened(path) == ROWS
    path.with_suffix(".json").write_text(path.read_text())
    assert opened(path.with_suffix(".json")) == ROWS


def test_rows_keep_keys_and_nulls_of_their_own(tmp_path: Path) -> None:
    mixed = [{"a": 1}, {"b": None, "c": {"x": None}}, {"a": "text"}]
    assert opened(write_lines(tmp_path / "mixed.jsonl", mixed)) == mixed


def test_a_json_list(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS))
    assert opened(path) == ROWS


def test_a_huge_row(tmp_path: Path) -> None:
    rows = [ROWS[0], {"prompt": "x" * 3_000_000, "completion": "y"}, ROWS[1]]
    assert opened(write_lines(tmp_path / "huge.jsonl", rows)) == rows


def test_parquet_arrow_and_saved_folders(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_list(ROWS)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    DatasetDict({"train": data, "test": data.select([4])}).save_to_disk(str(tmp_path / "splits"))
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    assert opened(tmp_path / "rows.parquet") == ROWS
    assert opened(tmp_path / "saved") == ROWS
    assert opened(arrow) == ROWS
    assert opened(tmp_path / "splits") == ROWS and opened(tmp_path / "splits", None, "test") == ROWS[4:]
    with pytest.raises(ValueError, match="no split dev; it has train, test"):
        opened(tmp_path / "splits", None, "dev")


def test_a_folder_has_splits_by_name_and_subsets_by_folder(tmp_path: Path) -> None:
    write_lines(tmp_path / "train-0.jsonl", ROWS[:2])
    write_lines(tmp_path / "train-1.jsonl", ROWS[2:3])
    write_lines(tmp_path / "test.jsonl", ROWS[3:4])
    write_lines(tmp_path / "extra" / "test" / "x.jsonl", ROWS[4:])
    assert opened(tmp_path) == ROWS[:3]
    assert opened(tmp_path, None, "test") == [ROWS[4], ROWS[3]]
    assert opened(tmp_path, "extra", "test") == ROWS[4:]
    assert opened(tmp_path / "train-*.jsonl") == ROWS[:3]


def test_a_folder_without_splits_is_read_whole(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS[:2])
    write_lines(tmp_path / "b.jsonl", ROWS[2:])
    assert opened(tmp_path) == ROWS
    with pytest.raises(ValueError, match=r"no .* file of split test \(it holds: a\.jsonl, b\.jsonl\)"):
        opened(tmp_path, None, "test")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("rows.csv", "a,b\n", "unknown suffix"),
        ("rows.jsonl", "", "no rows"),
        ("rows.json", '{"a": 1', "not a JSON object"),
        ("rows.jsonl", "[1]\n", "the row is list"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=reason):
        opened(tmp_path / name)


def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple] = []

    def load(*args: Any, **options: Any) -> Any:
        asked.append((args, options))
        if args[0] == "no/such":
            raise FileNotFoundError("404")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=r"data\.path=no/such: .*404"):
        opened("no/such")
    assert opened("some/set", "sub", "dev", revision="v1") == ROWS
    assert asked[-1] == (("some/set", "sub"), {"split": "dev", "revision": "v1"})


def test_the_shipped_data_is_what_its_maker_makes(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "sft" / "make_data.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.jsonl")}
    shipped = {path.relative_to(ROOT / "data"): path.read_text() for path in (ROOT / "data").rglob("*.jsonl")}
    assert made == shipped and len(made) == 6
    assert bundled_data() == ["instructions", "reverse_text", "tool_calls"]
    assert len(opened("bundled:reverse_text")) == 2000
    assert len(opened("bundled:reverse_text", None, "test")) == 200
    with pytest.raises(ValueError, match="prl ships instructions, reverse_text, tool_calls"):
        opened("bundled:books")


def test_no_test_row_is_trained_on() -> None:
    for name in ("reverse_text", "instructions"):
        train, test = (
            {json.dumps(row) for row in opened(f"bundled:{name}", None, split)} for split in ("train", "test")
        )
        assert not train & test and len(test) == 200


def test_every_shipped_answer_is_right() -> None:
    for row in opened("bundled:reverse_text"):
        assert row["completion"] == f"[{row['prompt'].removeprefix('reverse ')[::-1]}]"
    for row in opened("bundled:tool_calls"):
        _, call, result, answer = row["messages"]
        arguments = json.loads(call["tool_calls"][0]["function"]["arguments"])
        assert answer["content"] == f"[{result['content']}]"
        assert "item" in arguments or int(result["content"]) == arguments["a"] + arguments["b"]
