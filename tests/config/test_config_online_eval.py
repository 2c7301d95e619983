"""`eval.*` of `prl rl`: choosing environments by name, and what is refused."""

from __future__ import annotations

import logging

import pytest

from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.load import build, dump_resolved
from prl.config.schema import RlConfig
from prl.env.server import eval_seed, served_environment


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        compose_job("rl", overrides)
    return str(caught.value)


def test_environments_are_chosen_by_name_and_changed_by_path() -> None:
    words = ["eval.env=[reverse_text,arithmetic]", "eval.interval=7", "eval.env.arithmetic.interval=3"]
    config = compose_job("rl", [*words, "eval.env.reverse_text.select.limit=5", "env=[word_guess]"])
    assert list(config.env) == ["word_guess"] and list(config.eval.env) == ["reverse_text", "arithmetic"]
    assert config.eval.env["arithmetic"].interval == 3 and config.eval.env["reverse_text"].interval is None
    assert config.eval.env["reverse_text"].select.limit == 5 and config.eval.interval == 7


def test_without_a_choice_nothing_is_evaluated() -> None:
    assert compose_job("rl", []).eval.env == {} and compose_job("rl", ["eval.env=[]"]).eval.env == {}


def test_a_resolved_config_comes_back_with_its_evaluations() -> None:
    import yaml

    config = compose_job("rl", ["eval.env=[reverse_text]", "eval.env.reverse_text.interval=2"])
    tree = yaml.safe_load(dump_resolved("rl", config))
    tree.pop("command")
    assert build(RlConfig, tree).eval == config.eval


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("eval.env=[reverse_texx]", "reverse_text"),
        ("eval.env=[reverse_text] eval.env.reverse_text.ratio=2", "an evaluation has no use for it"),
        ("eval.env=[reverse_text] eval.env.reverse_text.min_abs_advantage=0.1", "no use for it"),
        ("eval.interval=0", "eval.interval"),
        (
            "eval.env=[arithmetic] eval.env.reverse_text.interval=3",
            "Choose it: eval.env=[arithmetic,reverse_text].",
        ),
        ("eval.env.reverse_text.interval=3", "nothing is evaluated on it"),
        ("env.reverse_text.elastic=true", "env.reverse_text.workers = 1 leaves no worker to add"),
        ("eval.env=[reverse_text] eval.env.reverse_text.interval=0", "must be at least 1"),
        ("eval.sampling.max_tokens=100000", "leaves no room for a prompt"),
        ("+eval.env.agg.id=reverse_text", "other than agg and all"),
        ("rollout.min_inflight=64 rollout.max_inflight=32", "above rollout.max_inflight = 32"),
        ("rollout.initial_inflight=64 rollout.max_inflight=32", "above rollout.max_inflight = 32"),
        ("rollout.initial_inflight=4", "fewer than one group"),
        ("rollout.transport=pigeon", "zmq"),
        ("rollout.tasks_per_minute=0", "must be more than 0"),
    ],
)
def test_what_cannot_work_is_refused_with_its_path(words: str, reason: str) -> None:
    assert reason in refused(*words.split())


def test_settings_that_will_not_act_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compose_job("rl", ["eval.interval=7"])
    assert "there is no environment to evaluate on" in caplog.text


def test_one_of_your_own_may_be_added_and_changed() -> None:
    words = [
        "+eval.env.mine.id=reverse_text",
        "eval.env.mine.interval=3",
        "sync=collective",
        "sync.timeout=9",
    ]
    config = compose_job("rl", words)
    assert config.eval.env["mine"].id == "reverse_text" and config.eval.env["mine"].interval == 3


def test_a_broadcast_that_an_evaluation_may_starve_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compose_job("rl", ["eval.env=[reverse_text]", "sync=collective"])
    assert "an evaluation that takes longer than sync.timeout = 600 s ends the run" in caplog.text


def test_a_server_serves_what_its_role_names_with_tasks_of_their_own_seed() -> None:
    config = compose_job("rl", ["eval.env=[reverse_text]", "eval.env.reverse_text.timeout=7", "seed=5"])
    env, seed = served_environment(config, "eval/reverse_text")
    assert env.timeout == 7 and seed == 6
    env, seed = served_environment(config, "reverse_text")
    assert env.timeout == 300 and seed == 5
    config.eval.seed = 5
    assert eval_seed(config) == 5
