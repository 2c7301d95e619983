"""What no run can do is refused at composition, or by the dry run where a user's own code must be seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from prl.algo.base import import_own_algorithms
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors

REFUSED = [
    ("algo=sft model.teacher=null", "algo.teacher.model = null: algo=sft needs a teacher"),
    ("algo=opd model.teacher=null", "algo.teacher.model = null: algo=opd needs a teacher"),
    ("algo=opd algo.teacher=policy", "algo.teacher = policy: a table {key: value} is needed"),
    ("algo=opd algo.teacher.model=absent", "algo.teacher.model = absent: no model there"),
    ("algo=opd algo.teacher.base_url=http://h:1", "must end in /v1"),
    ("algo=echo algo.roles={}", "echo without a role learns nothing from it"),
    ("algo=echo algo.roles.tool.alpha=0", "algo.roles.tool.alpha = 0: must be more than 0"),
    ("algo=hierarchical_grpo", "env.reverse_text has one agent; hierarchical_grpo compares several"),
    ("algo=hierarchical_grpo env=[kuhn_poker]", "env.kuhn_poker has no agent solver. Its agents: player0"),
    ("algo=hierarchical_grpo env=[proposer_solver] algo.episode_agents=[]", "at least one agent is needed"),
    ("algo=rae algo.decay=1", "algo.decay = 1: must be less than 1"),
    ("algo=rae algo.decay=-0.1", "algo.decay = -0.1: must be at least 0"),
    ("+algo.length_penalty.turns=-1", "algo.length_penalty.turns = -1: must be at least 0"),
    ("+algo.length_penalty.turns=.inf", "algo.length_penalty.turns"),
    ("algo=opsd algo.template=look", "has no {demonstration}"),
    ("rollout.group_size=1", "Set rollout.group_size=8, or algo=rae, which needs no group."),
    ("+env.agg.id=reverse_text", "this name stands for all environments in the metrics"),
    ("+env.all.id=reverse_text", "this name stands for all environments in the metrics"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_refused_at_composition(words: str, message: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        compose_job("rl", words.split())
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        "algo=hierarchical_grpo env=[proposer_solver]",
        "algo=hierarchical_grpo env=[kuhn_poker] algo.episode_agents=[player0]",
        "algo=rae rollout.group_size=1 env=[kuhn_poker]",
        "algo=opd algo.teacher.base_url=http://h:1/v1 algo.teacher.model=anything",
        "env=[reverse_text,proposer_solver] +algo@env.proposer_solver.algo=hierarchical_grpo",
    ],
)
def test_its_good_neighbour_composes(words: str) -> None:
    assert compose_job("rl", words.split()).algo


def test_a_teacher_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Its token ids mean other text, so its scores would be of something else."""
    from prl.assets import bundled_model

    for file in bundled_model("tiny").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|tool|>", "<|look|>"))
    with pytest.raises(ConfigErrors, match="its tokenizer differs from that of model tiny"):
        compose_job("rl", ["algo=opd", f"algo.teacher.model={tmp_path}"])


OWN = {
    "absent": ("my_algo_absent:Mine", "", "there is no module 'my_algo_absent'"),
    "no_class": ("my_algo_plain:mine", "def mine(): ...", "must be a subclass of prl.algo.Algorithm"),
    "frozen": (
        "my_algo_frozen:Mine",
        "from prl.algo import Algorithm\nclass Mine(Algorithm):\n    sampled_by = 'teacher'\n",
        "a policy gradient needs the policy's own logprobs",
    ),
    "arguments": (
        "my_algo_strict:Mine",
        "from prl.algo import Algorithm\nclass Mine(Algorithm):\n"
        "    def __init__(self, config, services, *, power): ...\n",
        "does not fit Mine (missing a required argument: 'power')",
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_an_algorithm_of_ones_own_is_looked_at_before_the_start(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_path, code, message = OWN[case]
    if code:
        (tmp_path / f"{import_path.partition(':')[0]}.py").write_text(code)
    options = tmp_path / "options" / "algo"
    options.mkdir(parents=True)
    (options / "mine.yaml").write_text(f"# Choose it.\nname: mine\nimport_path: {import_path}\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = compose_job("rl", ["algo=mine"], [tmp_path / "options"])
    with pytest.raises(ValueError, match="algo=mine: ") as refused:
        import_own_algorithms(config)
    assert message in str(refused.value)
