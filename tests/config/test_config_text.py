"""Text fields keep what was typed, and generated names are sound."""

from __future__ import annotations

import re

import pytest

from prl.config import identity
from prl.config.schema import RunConfig
from prl.config.validate import Validator


def test_what_hydra_reads_as_a_number_stays_text(rl) -> None:
    typed = ["2024_01_01", "1.10", "1e3", "007", "true", ".5e1", "nan"]
    config = rl(*(f"+run.tags.t{i}={text}" for i, text in enumerate(typed)), "run.name=2024_01_01")
    assert list(config.run.tags.values()) == typed
    assert config.run.name == "2024_01_01"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("run.name=1.10", "1.10"),
        ("run.name=a:b", "a:b"),
        ("run.name=two words", "two words"),
        ("run.name='1_0'", "1_0"),
        ('run.name="naïve, <new>"', "naïve, <new>"),
        ("++run.name=1e3", "1e3"),
    ],
)
def test_names_arrive_as_typed(rl, word: str, name: str) -> None:
    assert rl(word).run.name == name


def test_the_last_word_for_a_key_wins(rl) -> None:
    assert rl("run.name=1_0", "run.name='x'").run.name == "x"
    assert rl("run.name='x'", "run.name=1_0").run.name == "1_0"


def test_numbers_as_text_can_be_refused(rl) -> None:
    with pytest.raises(ValueError, match=r"run\.name = 10: text is needed, this is an integer"):
        rl("run.name=1_0", numbers_as_text=False)


def test_text_is_never_made_of_a_number_from_a_file() -> None:
    validator = Validator()
    assert validator.node(RunConfig, {"name": 1.10}, "run") == {}
    assert [problem.path for problem in validator.problems] == ["run.name"]


def test_null_text_is_null(rl) -> None:
    assert rl("run.resume=null", "model.path=null").model.path is None


def test_generated_names_say_what_runs(rl) -> None:
    names = {rl("env=[reverse_text,arithmetic]", "model.name=tiny").run.name for _ in range(2)}
    assert len(names) == 2
    assert all(re.fullmatch(r"reverse_text\+arithmetic--tiny--[0-9a-f]{8}", name) for name in names)


@pytest.mark.parametrize(
    ("model", "expected"),
    [("Qwen/Qwen3-0.6B", "qwen3-0.6b"), ("/models/My Model/", "my-model"), ("..", "x")],
)
def test_generated_names_are_lower_case_and_clean(rl, model: str, expected: str) -> None:
    config = rl()
    config.model.name = model
    name = identity.auto_name("rl", config)
    assert re.fullmatch(rf"reverse_text--{re.escape(expected)}--[0-9a-f]{{8}}", name)
    assert identity.name_fault(name) is None


@pytest.mark.parametrize("name", ["", ".", "a/b", "a\\b", "-x", ".x", " x", "x ", "a\nb", "é" * 101])
def test_bad_names_have_a_fault(name: str) -> None:
    assert identity.name_fault(name)


@pytest.mark.parametrize("name", ["x", "a b", "naïve", "a=b", "1.10", "a..b", "é" * 100])
def test_good_names_have_none(name: str) -> None:
    assert identity.name_fault(name) is None
