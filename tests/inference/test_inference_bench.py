"""`prl bench inference`: rounds on demand from engines in processes of their own, and the table of them."""

import json
from argparse import Namespace

import pytest

from prl.bench import inference
from prl.bench.inference_bare import _round, prompts_of
from prl.bench.inference_shapes import SHAPES, kv_bytes, write_shape

ARGS = Namespace(prompt=5, tokens=6, threads=1)


def test_a_bare_engine_measures_a_round_for_each_question(tmp_path):
    model = write_shape("0.3m", tmp_path / "model")
    with inference._bare("embedded", model, 2, ARGS, None) as ask:
        rounds = [ask(), ask()]
    for found in rounds:
        assert set(found) == {"first", "whole", "cpu"}
        assert all(seconds > 0 for seconds in found.values())


def test_an_engine_that_cannot_start_tells_why(tmp_path):
    with (
        pytest.raises(RuntimeError, match=r"(?s)embedded failed: .*No such file"),
        inference._bare("embedded", tmp_path / "nothing", 2, ARGS, None) as ask,
    ):
        ask()


def test_every_engine_of_a_batch_takes_its_turn_in_every_round(capsys):
    turns = []

    def engine(who, seconds):
        times = iter(seconds)

        def ask():
            turns.append(who)
            return {"first": 1.0, "whole": next(times), "cpu": 1.0}

        return ask

    asks = {"bare": engine("bare", [3.0, 2.0]), "served": engine("served", [4.0, 5.0])}
    rows = inference._rounds(asks, 4, Namespace(rounds=2, **vars(ARGS)))
    assert turns == ["bare", "served"] * 2
    assert [(row["who"], row["tokens_per_second"]) for row in rows] == [("bare", 12.0), ("served", 6.0)]
    assert capsys.readouterr().err.splitlines()[0] == "bare, 4 at once: 8 tokens/s"


def test_the_table_of_a_whole_run_compares_with_the_bare_engine(tmp_path, capsys):
    words = [
        "--model",
        "0.3m",
        "--batch",
        "2,1",
        "--prompt",
        "4",
        "--tokens",
        "4",
        "--rounds",
        "1",
        "--no-hf",
    ]
    assert inference.main([*words, "--json", str(tmp_path / "found.json")]) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["who"], row["batch"]) for row in rows] == [
        (f"embedded, {kind}", batch) for batch in (1, 2) for kind in ("bare", "served")
    ]
    assert all(row["cpu_microseconds_per_token"] > 0 for row in rows if row["who"] == "embedded, bare")
    for bare, served in (rows[:2], rows[2:]):
        assert bare["relative"] == 1
        assert served["relative"] == served["tokens_per_second"] / bare["tokens_per_second"]
    assert "of bare" in capsys.readouterr().out


def test_keys_and_values_of_a_batch_fit(tmp_path):
    """Two layers of two heads of 24: 2 * 2 * 2 * 24 elements a token, of two bytes."""
    model = write_shape("0.3m", tmp_path)
    assert 4 * 100 * 192 * 2 < kv_bytes(model, 4, 100, 2) < 1.5 * 4 * 100 * 192 * 2


def test_a_row_has_the_best_of_each_measure():
    rounds = [{"first": 2.0, "whole": 4.0, "cpu": 3.0}, {"first": 3.0, "whole": 3.0, "cpu": 3.6}]
    row = inference._row("x", 10, ARGS, rounds)
    assert row["tokens_per_second"] == pytest.approx(10 * 6 / 3.0)
    assert row["requests_per_second"] == pytest.approx(10 / 3.0)
    assert row["first_token_seconds"] == 2.0
    assert row["cpu_microseconds_per_token"] == pytest.approx(3e6 / 60)


def test_a_round_asks_for_one_token_and_then_for_all():
    asked = []
    found = _round(asked.append, 7)
    assert asked == [1, 7] and set(found) == {"first", "whole", "cpu"}


def test_prompts_differ_and_hold_no_special_token():
    prompts = prompts_of(6, 9, SHAPES["0.3m"]["vocab_size"])
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert all(len(prompt) == 9 and min(prompt) >= 3 and max(prompt) < 512 for prompt in prompts)


def test_the_table_names_every_column():
    rounds = [{"first": 2.0, "whole": 4.0, "cpu": 3.0}]
    rows = [{**inference._row("HF generate", 1, ARGS, rounds), "relative": 1.0}]
    args = Namespace(model="0.3m", rounds=1, **vars(ARGS))
    head, line = inference._table(args, rows).splitlines()[1:]
    assert all(name in head for name in inference.HEADS)
    assert line.split()[:3] == ["HF", "generate", "1"] and len(line.split()) == len(inference.HEADS) + 1
