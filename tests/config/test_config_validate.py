"""The validator alone, on a schema of its own: every kind of field, every kind of fault."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from prl.config.errors import NO_VALUE, Problem, nearest, shell_word, show, suggest
from prl.config.fields import opt
from prl.config.validate import Validator, leaf_paths


@dataclass
class Inner:
    share: float = opt(0.5, "A share.", ge=0, le=1)


@dataclass
class Outer:
    must: str = opt(doc="Nobody can guess it.")
    count: int = opt(1, ge=1)
    flag: bool = opt(False)
    maybe: float | None = opt(None, gt=0)
    numbers: list[float] = opt(factory=list, ge=0)
    kind: str = opt("a", choices=("a", "b"))
    inner: Inner = opt(factory=Inner)
    option: Inner | None = opt(None)
    table: dict[str, Inner] = opt(factory=dict)
    free: dict[str, Any] = opt(factory=dict)
    whole: dict[str, Inner] = opt(factory=lambda: {"x": Inner()}, replaced=True)


def judge(tree: dict[str, Any], **as_typed: str) -> tuple[dict[str, Any], list[str]]:
    validator = Validator(as_typed)
    clean = validator.node(Outer, {"must": "be", **tree}, "")
    return clean, [f"{problem.path}: {problem.reason}" for problem in validator.problems]


@pytest.mark.parametrize(
    ("tree", "clean"),
    [
        ({"maybe": 3}, {"maybe": 3.0}),
        ({"maybe": None}, {"maybe": None}),
        ({"numbers": [1, 0.5]}, {"numbers": [1.0, 0.5]}),
        ({"inner": {"share": 1}}, {"inner": {"share": 1.0}}),
        ({"option": {}}, {"option": {}}),
        ({"table": {"a": {}, "b": {"share": 0}}}, {"table": {"a": {}, "b": {"share": 0.0}}}),
        ({"free": {"a": [1, {"b": None}]}}, {"free": {"a": [1, {"b": None}]}}),
        ({"whole": None}, {}),
        ({"whole": {"y": {}}}, {"whole": {"y": {}}}),
        ({"flag": True, "kind": "b"}, {"flag": True, "kind": "b"}),
    ],
)
def test_good_values_pass_and_take_the_type_of_the_schema(
    tree: dict[str, Any], clean: dict[str, Any]
) -> None:
    result, problems = judge(tree)
    assert problems == []
    assert result == {"must": "be", **clean}
    assert {type(value) for value in result.values()} == {
        type(value) for value in {"must": "be", **clean}.values()
    }


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"count": True}, "count: an integer is needed, this is true or false"),
        ({"count": 0}, "count: must be at least 1"),
        ({"count": None}, "count: an integer is needed"),
        ({"flag": "yes"}, "flag: true or false is needed, this is text"),
        ({"maybe": 0}, "maybe: must be more than 0"),
        ({"maybe": float("inf")}, "maybe: must be finite"),
        ({"numbers": [1, -1]}, "numbers: must be at least 0"),
        ({"numbers": 1}, "numbers: a list [a number, ...] is needed, this is an integer"),
        ({"kind": "c"}, "kind: not one of the choices"),
        ({"inner": None}, "inner: a table {key: value} is needed"),
        ({"inner": {"share": 2}}, "inner.share: must be at most 1"),
        ({"inner": {"shar": 1}}, "inner.shar: unknown key of inner"),
        ({"option": {"x": 1}}, "option.x: unknown key of option"),
        ({"table": {"a": {"share": "x"}}}, "table.a.share: a number is needed, this is text"),
        ({"table": {"a": 1}}, "table.a: a table {key: value} is needed, this is an integer"),
        ({"table": []}, "table: a table {key: value} is needed, this is a list"),
        ({"must": 5}, "must: text is needed, this is an integer"),
        ({"must": "???"}, "must: missing"),
        ({"muts": "be"}, "muts: unknown key"),
    ],
)
def test_each_fault_is_found(tree: dict[str, Any], problem: str) -> None:
    assert judge(tree)[1] == [problem]


def test_all_faults_are_found_and_the_rest_is_kept() -> None:
    clean, problems = judge({"count": "x", "kind": "z", "inner": {"share": 9}, "maybe": 2, "more": 1})
    assert len(problems) == 4
    assert clean == {"must": "be", "maybe": 2.0, "inner": {}}


def test_an_absent_mandatory_value_makes_the_pass_incomplete() -> None:
    validator = Validator()
    validator.node(Outer, {}, "")
    assert validator.incomplete and validator.problems[0].remedy == "Set must=...: Nobody can guess it."
    validator = Validator()
    validator.node(Outer, {"must": "be", "count": "x"}, "")
    assert not validator.incomplete


def test_text_as_typed_stands_in_for_the_number_that_it_became() -> None:
    clean, problems = judge({"must": 10}, must="1_0")
    assert (clean["must"], problems) == ("1_0", [])


def test_leaf_paths_cover_jobs_and_options() -> None:
    paths = set(leaf_paths())
    assert {
        "optim.lr",
        "rollout.sampling.top_p",
        "env.<name>.sampling.top_k",
        "loss.eps",
        "data.format_share",
    } <= paths
    assert "rollout" not in paths


def test_wording() -> None:
    assert str(Problem("a.b", None, "why", "Do.")) == "a.b = null: why. Do."
    assert str(Problem("a", NO_VALUE, "missing")) == "a: missing."
    assert nearest("gpro", ["grpo", "rae"]) == "grpo" and nearest("zzz", ["grpo"]) is None
    assert suggest("x", ["b", "a"]) == "Valid: a, b."
    assert suggest("x", []) == "Valid: none."
    assert (show(True), show(None), show("none")) == ("true", "null", "none")
    assert len(show("x" * 500)) == 120
    assert shell_word("a='b'") == "\"a='b'\"" and shell_word("a=$b") == "'a=$b'"
