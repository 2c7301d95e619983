"""`key=`, `+key=`, `++key=` and `~key` do what Hydra's users expect, and Hydra is shown what was typed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from prl.__main__ import main as prl
from prl.config import hydra_app
from prl.config.command_line import parse
from prl.config.compose import compose_job, open_options
from prl.config.composition import choose


def test_plus_adds_and_does_not_change(rl, judge) -> None:
    (message,) = judge("+optim.lr=1")
    assert message == (
        'optim.lr = 1: `+` adds a key, this one is there already. Write "optim.lr=1" to change it.'
    )
    assert judge("+run.tags.a=x", "+run.tags.a=y") == [
        'run.tags.a = y: `+` adds a key, this one is there already. Write "run.tags.a=y" to change it.'
    ]
    assert rl("+run.tags.a=x", "run.tags.a=y").run.tags == {"a": "y"}
    assert rl("+algo.length_penalty.turns=1").algo.length_penalty.turns == 1.0


def test_plus_plus_adds_or_changes(rl) -> None:
    config = rl("++optim.lr=0.5", "++run.tags.new=x")
    assert (config.optim.lr, config.run.tags) == (0.5, {"new": "x"})


def test_a_table_that_is_open_takes_keys_without_plus(rl) -> None:
    assert rl("run.tags.a=x", "env_vars.all.B=1").run.tags == {"a": "x"}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("~optim.lr", "optim.lr: every run has this key, so it cannot be removed. Set it: optim.lr=..."),
        ("~env.reverse_text.ratio", "env.reverse_text.ratio: every run has this key"),
        ("~run.tags.nope", "run.tags.nope: cannot be removed (Could not delete from config."),
        ("~seed=3", "seed: every run has this key"),
    ],
)
def test_tilde_removes_only_what_need_not_be_there(judge, word: str, message: str) -> None:
    (told,) = judge(word)
    assert told.startswith(message)


def test_tilde_removes_entries_of_tables_and_choices(rl) -> None:
    config = rl("env=[reverse_text,arithmetic]", "~env.arithmetic", "+run.tags.a=x", "~run.tags.a")
    assert list(config.env) == ["reverse_text"] and config.run.tags == {}
    assert rl("debug=smoke", "~debug").max_steps == 30
    assert rl("ckpt=end", "~ckpt").ckpt.at_end is False


def test_the_short_way_to_compose_gives_what_hydra_gives() -> None:
    from hydra.types import RunMode
    from omegaconf import OmegaConf, open_dict

    for command, lines in {
        "rl": ["algo=opd", "env=[reverse_text,arithmetic]", "+algo@env.arithmetic.algo=echo", "debug=smoke"],
        "sft": ["experiment=tiny_warm_start"],
        "eval": ["experiment=offline_suite"],
    }.items():
        with open_options(command, []) as options:
            loader = options.reader.loader
            short = OmegaConf.to_container(choose(loader, command, lines), resolve=True)
            whole = loader.load_configuration(command, lines, RunMode.RUN)
        with open_dict(whole):
            del whole["hydra"]
        assert short == OmegaConf.to_container(whole, resolve=True)


def test_hydras_settings_are_composed_where_a_word_speaks_of_them(refused) -> None:
    assert compose_job("rl", ["hydra.sweep.dir=x"]).seed == 0
    (message,) = refused("hydra.swep.dir=x")
    assert "hydra.swep.dir" in message
    (message,) = refused("hydra/sweeper=nope")
    assert "nope" in message


def overrides_seen(*words: str) -> list[str]:
    from hydra.core.hydra_config import HydraConfig

    seen: list[str] = []

    def job(config: Any, words: Any) -> int:
        seen.extend(HydraConfig.get().overrides.task)
        return 0

    assert hydra_app.sweep(parse(["--multirun", *words], ["rl"]), job) == 0
    return seen


def test_a_sweep_is_shown_the_words_as_typed() -> None:
    seen = overrides_seen("loss=icepop", "max_steps=4", "+run.tags.a=x", "run.tags.b=y", "seed=1")
    assert seen == ["loss=icepop", "max_steps=4", "+run.tags.a=x", "++run.tags.b=y", "seed=1"]


def test_cfg_hydra_shows_the_words_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    assert prl(["--cfg", "hydra", "optim.lr=1e-4", "loss=icepop"]) == 0
    text = capsys.readouterr().out
    assert "- optim.lr=1e-4" in text and "++optim" not in text


def test_cfg_job_is_what_hydra_prints(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["zero=3", "optim.lr=1e-4", "+run.tags.a=x"]
    assert prl(["--cfg", "job", *words]) == 0
    ours = capsys.readouterr().out
    hydra_app.run_hydra(parse(words, ["rl"]), lambda _: None, ["--cfg", "job"])
    assert capsys.readouterr().out.rstrip("\n") == ours.rstrip("\n")
    assert "${oc.env:PRL_OUTPUT_DIR,outputs}" in ours
    assert prl(["--cfg", "job", "--resolve", "--package", "zero", *words]) == 0
    assert re.match(r"# @package zero\nstage: 3\n", capsys.readouterr().out)
    assert prl(["--cfg", "job", "--package", "nope"]) == 2
    assert "--package = nope: not in the configuration." in capsys.readouterr().err
    assert prl(["--cfg", "job", "optim.lrr=1"]) == 2


def test_a_config_of_ones_own_may_choose_among_hydras_settings(clean_place: Path) -> None:
    (clean_place / "mine" / "experiment").mkdir(parents=True)
    text = "# @package _global_\n# rl: choose mine.\ndefaults:\n  - override /hydra/sweeper: basic\nseed: 5\n"
    (clean_place / "mine" / "experiment" / "own.yaml").write_text(text)
    assert compose_job("rl", ["experiment=own"], ["mine"]).seed == 5
