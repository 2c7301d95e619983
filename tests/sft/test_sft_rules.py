"""What `prl sft` refuses before anything starts, and what its plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from prl.config.compose import compose_job
from prl.config.describe import describe_plan
from prl.config.errors import ConfigErrors
from prl.config.sft import FakeDataConfig, RowsDataConfig
from prl.sft.schedule import first_version, publishes

ROWS = ["data=rows", "data.path=bundled:reverse_text"]


def refused(*words: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        compose_job("sft", list(words))
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["data.batch_size=6", "cluster.train_ranks=4"],
            "data.batch_size = 6: not a multiple .* = 4. Write 8",
        ),
        (["data.batch_size=9", "data.micro_batch_size=2"], "not a multiple of .* = 2"),
        (["data.packing=fit", "data.micro_batch_size=2"], "packing=fit makes rows"),
        (["data.packing=heap"], "data.packing = heap: not one of the choices"),
        (["data=rows"], r"data\.path: missing"),
        (["data=rows", "data.path=./none.jsonl"], "no such file or folder"),
        (["data=rows", "data.path=rows.parquet"], "no such file or folder"),
        (["data=rows", "data.path=bundled:revers_text"], "prl ships no such data.*Nearest: reverse_text"),
        ([*ROWS, "data.splits=[a,b]", "data.subsets=[x,y,z]"], "2 splits for 3 subsets"),
        ([*ROWS, "data.splits=[]"], "an empty list names nothing"),
        ([*ROWS, "data.splits=[train,test]", "data.probabilities=[1.0]"], "1 shares for 2 subsets or splits"),
        ([*ROWS, "data.splits=[train,test]", "data.probabilities=[0.5,0]"], "must be more than 0"),
        (["data.loss_mask.assistant=false"], "no role is learned"),
        (["model.renderer=default"], "does not tell which tokens are the assistant's"),
        (["data@val.data=fake"], "it has no end"),
        (["val.at_start=true"], "there is nothing to validate on"),
        (["eval.env=[reverse_text]", "sync=collective"], "read weights from files"),
        (["eval.env=[reverse_text]", "eval.pin_version=false"], "always of one version"),
        (["eval.env=[reverse_text]", "eval.env.reverse_text.ratio=2"], "an evaluation has no use for it"),
        (["data.seed=-1"], "must be at least 0"),
        (["data.colums.tools=x"], "data.colums"),
    ],
)
def test_refused(words: list[str], reason: str) -> None:
    assert __import__("re").search(reason, refused(*words))


def test_names_of_the_hub_and_patterns_are_taken_as_they_are(tmp_path: Path) -> None:
    for path in ("owner/name", f"{tmp_path}/*.jsonl"):
        config = compose_job("sft", ["data=rows", f"data.path='{path}'"])
        assert isinstance(config.data, RowsDataConfig) and config.data.path == path


def test_one_split_goes_with_every_subset() -> None:
    config = compose_job(
        "sft", [*ROWS, "data.subsets=[a,b]", "data.splits=[train]", "data.probabilities=[0.5,0.5]"]
    )
    assert config.data.subsets == ["a", "b"]


def test_columns_of_the_renderer_are_replaced_as_a_whole() -> None:
    assert compose_job("sft", ROWS).data.columns.renderer == {"reasoning_effort": "reasoning_effort"}
    assert compose_job("sft", [*ROWS, "data.columns.renderer={}"]).data.columns.renderer == {}
    config = compose_job("sft", [*ROWS, "data.columns.renderer={enable_thinking: think}"])
    assert config.data.columns.renderer == {"enable_thinking": "think"}


def test_the_name_of_a_run_is_that_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "My Chats.jsonl").write_text("{}\n")
    named = compose_job("sft", ["data=rows", f"data.path='{tmp_path}/My Chats.jsonl'"]).run.name
    assert named.startswith("my-chats--tiny--")
    assert compose_job("sft", []).run.name.startswith("reverse_text--tiny--")


def test_the_plan_tells_data_validation_and_evaluation() -> None:
    plan = describe_plan(
        compose_job(
            "sft", ["data@val.data=reverse_text", "val.data.splits=[test]", "eval.env=[reverse_text]"]
        )
    )
    assert "8 rows of 256 tokens a step (cat)" in plan and "every 50 steps and at the end" in plan
    assert "evaluation   reverse_text" in plan
    assert "validation   none" in describe_plan(compose_job("sft", ["data=fake"]))


def test_an_option_for_own_options() -> None:
    config = compose_job("sft", ["data=fake", "data.length=variable"])
    assert isinstance(config.data, FakeDataConfig) and config.data.workers == 0
    assert compose_job("sft", ["data@val.data=reverse_text"]).val.data.path == "bundled:reverse_text"


def test_versions_are_published_where_an_evaluation_is_due_and_nowhere_else() -> None:
    words = [
        "max_steps=25",
        "eval.interval=10",
        "eval.env=[reverse_text,arithmetic]",
        "eval.env.arithmetic.interval=4",
    ]
    config = compose_job("sft", words)
    assert [v for v in range(26) if publishes(config, v)] == [0, 4, 8, 10, 12, 16, 20, 24, 25]
    config.run.resume = "/runs/x/checkpoints/step_7"
    assert first_version(config) == 7 and publishes(config, 7) and not publishes(config, 9)
    assert not any(publishes(compose_job("sft", ["max_steps=5"]), v) for v in range(6))
