"""`--multirun`: every combination is checked first, then each runs in its own directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prl.config import hydra_app
from prl.config.command_line import parse
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.store import sweep_id


def line(*words: str) -> Any:
    return parse(["--multirun", *words], ["rl", "sft", "export"])


def test_each_element_runs_in_its_own_directory(
    clean_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []
    typed: list[list[str]] = []

    def job(config: Any, words: Sequence[str]) -> int:
        seen.append(config)
        typed.append(list(words))
        return 0

    words = ["algo=grpo", "loss=ipo", "optim.lr=1e-4,3e-4", "zero=2", "max_steps=3", "run.tags.note='a b'"]
    assert hydra_app.sweep(line(*words), job) == 0
    assert [(c.optim.lr, c.zero.stage) for c in seen] == [(1e-4, 2), (3e-4, 2)]
    assert {c.max_steps for c in seen} == {3} and {c.run.tags["note"] for c in seen} == {"a b"}
    (parent,) = {c.output_dir for c in seen}
    assert Path(parent).parent == clean_place / "multirun" and Path(parent).name.endswith(sweep_id())
    assert [c.run.name for c in seen] == ["0", "1"]
    assert list(Path(parent, "0").iterdir()) == []
    alone = parse(typed[1], ["rl"])
    assert compose_job(alone.command, alone.overrides) == seen[1]
    assert "sweep: 2 runs, 0 failed" in capsys.readouterr().out


def test_failures_do_not_stop_the_sweep_but_end_it_badly(capsys: pytest.CaptureFixture[str]) -> None:
    codes = iter([0, 5, 0])
    assert hydra_app.sweep(line("seed=1,2,3"), lambda config, words: next(codes)) == 5
    assert "sweep: 3 runs, 1 failed\n  element 1: exit code 5" in capsys.readouterr().out


def test_an_interrupt_stops_the_sweep() -> None:
    codes = iter([0, 130, 0])
    assert hydra_app.sweep(line("seed=1,2,3"), lambda config, words: next(codes)) == 130
    assert next(codes) == 0


def test_options_can_be_swept() -> None:
    seen: list[str] = []
    words = ["loss=icepop", "env=[reverse_text],[reverse_text,arithmetic]", "hydra.sweep.dir=here"]
    hydra_app.sweep(
        line(*words),
        lambda c, words: seen.append(f"{c.loss.name} {len(c.env)} {Path(c.output_dir).name}") or 0,
    )
    assert seen == ["icepop 1 here", "icepop 2 here"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["optim.lr=1e-4,-1"], ["optim.lr = -1"]),
        (
            ["algo=grpo,gpro", "optim.lrr=1,2"],
            ["algo = gpro: no such option", "optim.lrr = 1: unknown key", "optim.lrr = 2: unknown key"],
        ),
        (
            ["rollout.group_size=16,3", "rollout.batch_size=32,48"],
            ["rollout.group_size = 3: rollout.batch_size = 32"],
        ),
        (["run.name=x", "seed=1,2"], ["run.name = x: a sweep names its runs itself"]),
        (["output_dir=x", "run.resume=latest", "seed=1,2"], ["output_dir = x", "run.resume = latest"]),
        (["run.tags.v=1_0,2_0"], ["run.tags.v = 10: text is needed", "run.tags.v = 20: text is needed"]),
        (["optim.lr=interval(0,1)"], ["--multirun: BasicSweeper does not support sweep type"]),
    ],
)
def test_every_combination_is_checked_before_any_runs(
    clean_place: Path, words: list[str], expected: list[str]
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        hydra_app.sweep(line(*words), lambda config, words: pytest.fail("a run started"))
    messages = [str(problem) for problem in caught.value.problems]
    assert [message.startswith(start) for message, start in zip(messages, expected, strict=True)] == [
        True
    ] * len(expected)
    assert list(clean_place.iterdir()) == []


def test_an_export_cannot_be_swept() -> None:
    with pytest.raises(ConfigErrors, match="nothing to sweep"):
        hydra_app.sweep(parse(["export", "-m", "run=a,b"], ["export"]), lambda config, words: 0)


def test_a_dry_run_makes_no_directory(clean_place: Path) -> None:
    seen: list[int] = []
    assert (
        hydra_app.sweep(line("seed=1,2", "dry_run=true"), lambda config, words: seen.append(config.seed) or 0)
        == 0
    )
    assert seen == [1, 2] and list(clean_place.iterdir()) == []


def test_own_options_reach_every_element(clean_place: Path) -> None:
    (clean_place / "mine" / "algo").mkdir(parents=True)
    (clean_place / "mine" / "algo" / "mine.yaml").write_text("# Choose it.\nname: mine\nimport_path: a.b:C\n")
    seen: list[str] = []
    hydra_app.sweep(
        line("algo=grpo,mine", "-cd", "mine"), lambda config, words: seen.append(config.algo.name) or 0
    )
    assert seen == ["grpo", "mine"]
