"""The short form of `prl eval` and the long one are the same command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from prl.config.command_line import parse
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.eval_line import expand, slug
from prl.config.load import dump_resolved, load_resolved
from prl.config.schema import EvalConfig
from prl.evals.sources import merge_envs, sampling_values

URL = "http://127.0.0.1:8000/v1"
AT_URL = f"inference=external client.base_url={URL}"


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRL_OUTPUT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)


def composed(text: str) -> EvalConfig:
    line = parse(expand(shlex.split(text)), ["rl", "eval"])
    config: EvalConfig = compose_job(line.command, line.overrides, line.config_dirs)
    return config


def refused(text: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        composed(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ("eval reverse_text -n 32 -r 4", "eval env=[reverse_text] select.limit=32 rollout.group_size=4"),
        ("eval reverse-text arithmetic", "eval env=[reverse_text,arithmetic]"),
        ("eval reverse_text -s -c 9", "eval env=[reverse_text] select.shuffle=true concurrency=9"),
        ("eval reverse_text -m tiny", "eval env=[reverse_text] model=tiny"),
        ("eval reverse_text --sampling.temperature 0.5", "eval rollout.sampling.temperature=0.5"),
        ("eval reverse_text --env.taskset.num_tasks 3", "eval env.reverse_text.taskset.num_tasks=3"),
        ("eval reverse_text --eval.errors=zero", "eval eval.errors=zero env=[reverse_text]"),
        (f"eval reverse_text -m a/b --client.base_url {URL}", f"eval {AT_URL} model.name=a/b"),
        (f"eval client.base_url={URL}", f"eval {AT_URL} inference.base_url={URL}"),
        ("eval reverse_text --run.name x --seed 3", "eval run.name=x seed=3 env=[reverse_text]"),
    ],
)  # fmt: skip
def test_short_and_long_are_the_same(short: str, long: str) -> None:
    one, two = composed(short), composed(long)
    one.run.name = two.run.name = "same"
    assert one == two


def test_other_commands_are_left_alone() -> None:
    for words in ([], ["-m", "a=1,2"], ["sft", "-c", "job"], ["optim.lr=1"]):
        assert expand(words) == words


def test_flags_of_prl_and_hydra_keep_working(tmp_path: Path) -> None:
    words = "eval reverse_text --dry-run --multirun --cfg job --config-dir d seed=1 --help"
    line = parse(expand(shlex.split(words)), ["eval"])
    assert line.flags >= {"--multirun", "--help"} and line.hydra_flags == ["--cfg", "job"]
    assert line.config_dirs == ["d"] and "dry_run=true" in line.overrides and "seed=1" in line.overrides


def test_a_model_is_an_option_a_directory_or_a_name(tmp_path: Path) -> None:
    from prl.assets import bundled_model

    config = composed(f"eval reverse_text -m {bundled_model('tiny')}")
    assert (config.model.name, config.model.path) == ("tiny", str(bundled_model("tiny")))
    assert composed(f"eval -m tiny --client.base_url {URL}").model.path is None
    assert "no bundled model 'enormous'" in refused("eval reverse_text -m enormous")


def test_own_options_are_found_in_a_config_directory(tmp_path: Path) -> None:
    (tmp_path / "mine" / "env").mkdir(parents=True)
    option = "# @package env.hard\n# Choose for a test.\ndefaults: [/schema/env@_here_]\nid: reverse_text\n"
    (tmp_path / "mine" / "env" / "hard.yaml").write_text(option)
    assert composed("eval --config-dir mine hard -n 3").env["hard"].id == "reverse_text"


def test_tasksets_that_are_no_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_taskset.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = composed("eval my-taskset -n 3 --env.timeout 7")
    assert config.env["my_taskset"].id == "my-taskset" and config.env["my_taskset"].timeout == 7
    assert slug("owner/my-set@1.0") == "my_set"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eval -n", "-n: a value must follow"),
        ("eval reverse_text env=[arithmetic]", "named twice, here and by env=[arithmetic]"),
        ("eval --env.timeout 3", "it is not said of which environment"),
        ("eval revers_text", "looked for the module 'revers_text' in prl, in verifiers and on the path"),
        ("eval revers_text", "Nearest: reverse_text; prl ships alphabet_sort"),
        ("eval --client.base_url 127.0.0.1:8000 ", "client.base_url = 127.0.0.1:8000: not a URL"),
        (f"eval inference=embedded client.base_url={URL}", "Add inference=external"),
        ("eval reverse_text steps=[0]", "Write numbers from 1 on, or final"),
        ("eval reverse_text steps=[final]", "it is not said of which run"),
        ("eval reverse_text steps=[final] model.path=nowhere", "model.path = nowhere: no such directory"),
        (f"eval steps=[1] model.path=. client.base_url={URL}", "takes no checkpoints"),
        ("eval checkpoints=x", "no steps of it are chosen"),
        ("eval --resume", "Add run.name=<the evaluation to continue>"),
        ("eval run.name=x run.resume=3", "an evaluation is resumed as a whole"),
        ("eval select.include.idx=[a]", "neither a position nor a slice"),
        ("eval --rollout.group_sise 4", "Nearest: rollout.group_size"),
        ("eval -r 0", "rollout.group_size = 0: must be at least 1"),
        ("eval rollout.sampling.max_tokens=512", "leaves no room for a prompt"),
        ("eval eval.errors=ignore", "eval.errors = ignore"),
    ],
)
def test_mistakes_are_told_with_their_remedy(text: str, expected: str) -> None:
    assert expected in refused(text)


def test_greedy_is_for_evaluation_only() -> None:
    assert composed("eval reverse_text --sampling.temperature 0").rollout.sampling.temperature == 0
    with pytest.raises(ConfigErrors, match="greedy rollouts of a task are all the same"):
        compose_job("rl", ["env.reverse_text.sampling.temperature=0"])


def test_an_endpoint_may_take_longer_completions_than_the_embedded_engine() -> None:
    assert (
        composed(f"eval --client.base_url {URL} --sampling.max_tokens 4096").rollout.sampling.max_tokens
        == 4096
    )


def test_environments_inherit_key_by_key() -> None:
    config = composed(
        "eval env=[reverse_text,arithmetic] select.limit=32 select.skip=2 select.include.idx=['0:90'] "
        "rollout.group_size=4 rollout.sampling.max_tokens=9 rollout.sampling.temperature=0.5 "
        "shared.agents.agent.max_turns=3 shared.agents.agent.timeout.rollout=9 "
        "env.arithmetic.select.limit=8 env.arithmetic.group_size=2 env.arithmetic.sampling.temperature=0 "
        "env.arithmetic.agents.agent.max_turns=5 env.arithmetic.select.include.idx=[7]"
    )
    merge_envs(config)
    first, second = config.env["reverse_text"], config.env["arithmetic"]
    assert (first.select.limit, first.select.skip, first.group_size, first.sampling.temperature) == (
        32,
        2,
        4,
        0.5,
    )
    assert (second.select.limit, second.select.skip, second.group_size) == (8, 2, 2)
    assert (second.sampling.temperature, second.sampling.max_tokens) == (0, 9)
    assert (first.select.include.idx, second.select.include.idx) == (["0:90"], [7])
    assert first.agents == {"agent": {"max_turns": 3, "timeout": {"rollout": 9}}}
    assert second.agents == {"agent": {"max_turns": 5, "timeout": {"rollout": 9}}}
    again = load_resolved_copy(config)
    merge_envs(again)
    assert again == config, "merging what is merged changes nothing"


def test_provider_keys_reach_the_request() -> None:
    config = composed(
        "eval env=[reverse_text,arithmetic] rollout.sampling.reasoning_effort=high "
        "+rollout.sampling.extra_body.min_tokens=2 +env.arithmetic.sampling.extra_body.echo=true"
    )
    merge_envs(config)
    shared = {"reasoning_effort": "high", "min_tokens": 2}
    assert sampling_values(config.env["reverse_text"].sampling) == shared
    assert sampling_values(config.env["arithmetic"].sampling) == {**shared, "echo": True}
    assert "it has a field" in refused("eval reverse_text +rollout.sampling.extra_body.temperature=1")


def load_resolved_copy(config: EvalConfig) -> Any:
    path = Path("resolved.yaml")
    path.write_text(dump_resolved("eval", config))
    return load_resolved(path)[1]


def test_experiments_compose_with_flags() -> None:
    config = composed("eval experiment=offline_suite -n 5 -r 2")
    assert len(config.env) >= 3 and config.select.limit == 5 and config.rollout.group_size == 2
