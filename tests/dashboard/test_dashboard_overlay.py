from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import Shape, write_run

from prl.dashboard.annotations import Annotations
from prl.dashboard.catalog import Run
from prl.dashboard.overlay import expand, node_tokens, spread, token_text, trainer_logprobs


def node(tokens: int, mask: Any, logprobs: list[float], parent: int | None = None) -> dict[str, Any]:
    return {"parent": parent, "token_ids": list(range(10, 10 + tokens)), "mask": mask, "logprobs": logprobs}


def sample(tokens: int, *logprobs: float) -> dict[str, Any]:
    return {"trace": "t", "step": 3, "tokens": tokens, "logprobs": list(logprobs)}


CHAT = {
    "branches": [[0, 1, 2, 3]],
    "nodes": [
        node(3, 0, []),
        node(3, [0, 1, 1], [-1.0, -2.0], 0),
        node(2, 0, [], 1),
        node(2, 1, [-3.0, -4.0], 2),
    ],
}
"""question, answer (its first token is not sampled), tool result, answer."""

FORKED = {
    "branches": [[0, 1], [0, 2], [0, 1, 3]],
    "nodes": [
        node(2, 0, []),
        node(2, 1, [-1.0, -1.5], 0),
        node(3, 1, [-2.0, -2.0, -2.0], 0),
        node(1, 1, [-5.0], 1),
    ],
}


def test_one_value_stands_for_equal_ones() -> None:
    assert expand(1, 3) == [1, 1, 1]
    assert expand([1, 0, 1], 3) == [1, 0, 1]
    assert expand(None, 2) == [None, None]


def test_values_of_sampled_tokens_are_put_on_those_tokens() -> None:
    assert spread([-1.0, -2.0], [0, 1, 0, 1]) == [None, -1.0, None, -2.0]
    assert spread(0.5, [1, 0, 1]) == [0.5, None, 0.5]
    assert spread(None, [1, 1]) == [None, None]
    assert spread([], [0, 0]) == [None, None]
    assert spread([-1.0], [1, 1]) == [-1.0, None]


def test_a_sample_is_laid_over_the_messages_of_its_branch() -> None:
    columns = trainer_logprobs(CHAT, [sample(10, -1.1, -2.1, -3.1, -4.1)])
    assert columns == [[None] * 3, [None, -1.1, -2.1], [None] * 2, [-3.1, -4.1]]


def test_a_sample_that_was_cut_covers_its_beginning() -> None:
    columns = trainer_logprobs(CHAT, [sample(9, -1.1, -2.1, -3.1)])
    assert columns[3] == [-3.1, None]


def test_a_message_that_branches_share_has_the_logprobs_of_the_first() -> None:
    trained = [sample(5, -2.1, -2.2, -2.3), sample(5, -5.1), sample(4, -1.1, -1.6)]
    columns = trainer_logprobs(FORKED, trained)
    assert columns == [[None] * 2, [-1.1, -1.6], [-2.1, -2.2, -2.3], [-5.1]]


def test_the_first_token_of_a_branch_is_never_trained() -> None:
    bare = {"branches": [[0]], "nodes": [node(3, 1, [-1.0, -2.0, -3.0])]}
    assert trainer_logprobs(bare, [sample(3, -2.2, -3.3)]) == [[None, -2.2, -3.3]]


@pytest.mark.parametrize("trained", [[], [sample(10, -1.0)], [sample(99, -1.0, -2.0, -3.0, -4.0)]])
def test_what_does_not_fit_is_not_shown(trained: list[dict[str, Any]]) -> None:
    assert all(value is None for column in trainer_logprobs(CHAT, trained) for value in column)


def test_tokens_come_with_everything_that_is_known_of_them() -> None:
    credit = {"advantages": [None, [0.5, -0.5], None, 0.25]}
    told = node_tokens(CHAT, 1, credit, [sample(10, -1.5, -1.0, -3.0, -4.0)], lambda token: f"<{token}>")
    assert told == {
        "ids": [10, 11, 12],
        "texts": ["<10>", "<11>", "<12>"],
        "mask": [0, 1, 1],
        "logprobs": [None, -1.0, -2.0],
        "advantages": [None, 0.5, -0.5],
        "trainer": [None, -1.5, -1.0],
        "gap": [None, -0.5, 1.0],
        "left_out": 0,
    }
    assert node_tokens(CHAT, 3, credit, [], str)["advantages"] == [0.25, 0.25]
    assert node_tokens(CHAT, 3, None, [], str)["advantages"] == [None, None]


def test_a_very_long_message_is_cut() -> None:
    long = {"branches": [[0]], "nodes": [node(30_000, 1, [-1.0] * 30_000)]}
    told = node_tokens(long, 0, None, [], str)
    assert len(told["ids"]) == len(told["gap"]) == 20_000
    assert told["left_out"] == 10_000


def test_the_bundled_tokenizer_names_tokens() -> None:
    text_of, known = token_text({"name": "tiny", "path": None})
    assert known
    assert "".join(text_of(token) for token in (4, 89, 76, 93, 228, 72, 7)) == "<|user|>rev a<|end|>"


@pytest.mark.parametrize(
    "model", [None, {"name": "elsewhere", "path": "/not/here"}, {"name": "no such", "path": None}]
)
def test_without_a_tokenizer_an_id_stands_for_itself(model: dict[str, Any] | None) -> None:
    text_of, known = token_text(model)
    assert not known
    assert text_of(17) == "⟨17⟩"


def annotations(path: Path) -> Annotations:
    return Annotations(Run("id", path.resolve(), path.resolve()))


def test_annotations_are_found_by_trace_also_those_that_come_later(tmp_path: Path) -> None:
    write_run(tmp_path, Shape(episodes=64, error_rate=0.0))
    notes = annotations(tmp_path)
    expected = [json.loads(line) for line in (tmp_path / "traces" / "annotations.jsonl").open()]
    assert notes.credit("t37") == expected[37]
    assert notes.trainer("t37")[0]["step"] == expected[37]["step"]
    assert notes.credit("t999") is None and notes.trainer("t999") == []
    late = {
        "episode": "e37",
        "trace": "t37",
        "step": 9,
        "attempt": 2,
        "advantage": 7.0,
        "advantages": [None, 7.0],
    }
    with (tmp_path / "traces" / "annotations.jsonl").open("a") as file:
        file.write(json.dumps(late) + "\n")
    assert notes.credit("t37") == late


def test_the_newest_step_of_a_trace_counts_over_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    lines = {0: [(1, -1.0), (2, -2.0)], 1: [(2, -3.0)]}
    for rank, told in lines.items():
        text = "".join(json.dumps({**sample(2, value), "step": step}) + "\n" for step, value in told)
        (tmp_path / "traces" / f"trainer_{rank}.jsonl").write_text(text)
    assert [line["logprobs"] for line in annotations(tmp_path).trainer("t")] == [[-2.0], [-3.0]]


def test_annotations_of_another_run_in_the_directory_are_read_anew(tmp_path: Path) -> None:
    write_run(tmp_path, Shape(episodes=64, error_rate=0.0))
    notes = annotations(tmp_path)
    assert notes.credit("t60") is not None
    for file in list((tmp_path / "traces").iterdir()):
        file.unlink()
    write_run(tmp_path, Shape(episodes=80, error_rate=0.0, seed=8))
    told = notes.credit("t70")
    assert told is not None and told["trace"] == "t70"
