"""Algorithms in whole runs: teachers served by prl and elsewhere, algorithms mixed, one of a user's own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from algo_run_lab import environment, episodes, finished, prl, rows, values

from prl.config.compose import compose_job
from prl.config.load import dump_resolved
from prl.run_dir import RunDir

pytestmark = pytest.mark.e2e


def test_icepop_bounds_rule_the_credit_of_a_served_teacher(tmp_path: Path) -> None:
    """The second batch is off policy by a step: tight bounds drop tokens of it, and only of ref_kl."""
    run = finished(
        tmp_path, "opd", "algo=opd", "loss=icepop", "loss.ratio_low=0.99999", "loss.ratio_high=1.00001"
    )
    masked = values(run, "trainer", "ref_kl/is_masked/mean")
    assert len(masked) == 2 and 0.0 < masked[1] <= 1.0
    assert all(value < 0 for value in values(run, "trainer", "ref_kl/mean")), "the teacher is another model"
    assert not values(run, "trainer", "is_masked/mean"), "no token enters the rl component"
    assert (run / "logs" / "attempt_1" / "teacher" / "shared.log").is_file()


def test_three_algorithms_in_one_run(tmp_path: Path) -> None:
    """grpo, opd and hard distillation, each over its own tokens, each teacher its own process."""
    (tmp_path / "options" / "env").mkdir(parents=True)
    (tmp_path / "options" / "env" / "sums.yaml").write_text(
        "# @package env.sums\n# Choose sums.\ndefaults: [/schema/env@_here_]\nid: arithmetic\n"
    )
    run = finished(
        tmp_path,
        "mixed",
        *("--config-dir", "options", "env=[reverse_text,arithmetic,sums]", "rollout.batch_size=24"),
        *("+algo@env.arithmetic.algo=opd", "+algo@env.sums.algo=sft"),
    )
    roles = {path.stem for path in (run / "logs" / "attempt_1" / "teacher").glob("*.log")}
    assert roles == {"arithmetic", "sums"}
    seen = {key for row in rows(run, "trainer") for key in row}
    assert {"ref_kl/mean", "nll/mean"} <= seen, "both distillations had members"
    frozen = {episode["env"]: episode["policy"] is None for episode in episodes(run)}
    assert frozen == {"reverse_text": False, "arithmetic": False, "sums": True}


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """URL of a teacher that another prl serves."""
    config = compose_job("rl", ["model.name=tiny_teacher", "run.name=elsewhere", "tracking=none"])
    run = RunDir(tmp_path / "elsewhere")
    run.configs.mkdir(parents=True)
    run.resolved_config.write_text(dump_resolved("rl", config))
    command = [sys.executable, "-m", "launchers.role", "inference", str(run.resolved_config)]
    with (tmp_path / "server.log").open("wb") as out:
        server = subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    try:
        yield run.wait_for_address_blocking("inference", 120) + "/v1"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def test_a_teacher_served_elsewhere(tmp_path: Path, endpoint: str) -> None:
    """It scores for one environment and samples for the other; this run serves no teacher."""
    own = "env.arithmetic.algo.teacher.base_url"
    run = finished(
        tmp_path,
        "external",
        *("env=[reverse_text,arithmetic]", "algo=opd", f"algo.teacher.base_url={endpoint}"),
        *("+algo@env.arithmetic.algo=sft", f"{own}={endpoint}", "rollout.batch_size=16"),
    )
    assert not (run / "logs" / "attempt_1" / "teacher").exists()
    assert len(values(run, "trainer", "ref_kl/mean")) >= 1
    assert {episode["env"] for episode in episodes(run) if episode["policy"] is None} == {"arithmetic"}


def test_a_teacher_that_takes_no_tokens_ends_the_run_at_once(tmp_path: Path, endpoint: str) -> None:
    wrong = endpoint.replace("/v1", "/nowhere/v1")
    started = time.monotonic()
    done = prl(tmp_path, "algo=opd", f"algo.teacher.base_url={wrong}", "tracking=none", "max_steps=2")
    assert done.returncode == 1 and time.monotonic() - started < 120
    assert "env.reverse_text: teacher 'tiny_teacher' at" in done.stdout + done.stderr


def test_an_algorithm_of_a_users_package(tmp_path: Path) -> None:
    """One class and one option, both outside prl."""
    package, options = tmp_path / "site" / "my_package", tmp_path / "options" / "algo"
    package.mkdir(parents=True)
    options.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "signs.py").write_text(
        textwrap.dedent(
            """
            from prl.algo import Algorithm
            from prl.algo.credit import assign_advantage, trainable_traces


            class Signs(Algorithm):
                def __init__(self, config, services, bar):
                    super().__init__(config, services)
                    self.bar, self.groups = bar, 0

                async def score_group(self, episodes):
                    self.groups += 1
                    for trace in trainable_traces(episodes):
                        assign_advantage(trace, 1.0 if trace.reward > self.bar else -1.0)

                def metrics(self):
                    return {"groups": float(self.groups)}
            """
        )
    )
    (options / "signs.yaml").write_text(
        "# Choose it.\nname: signs\nimport_path: my_package.signs:Signs\nkwargs: {bar: 0.5}\n"
    )
    run = finished(
        tmp_path, "own", "--config-dir", "options", "algo=signs", "algo.kwargs.bar=0.1",
        paths=(tmp_path / "site",),
    )  # fmt: skip
    groups = values(run, "orchestrator", "algo/reverse_text/groups")
    assert len(groups) == 2 and groups[-1] >= 4, "two batches of two groups"


def test_several_turns_and_several_agents(tmp_path: Path) -> None:
    """echo on what a tool said, rae on both seats of a game, hierarchical_grpo on proposer and solvers."""
    run = finished(
        tmp_path,
        "agents",
        *("env=[checked_reverse,kuhn_poker,proposer_solver]", "rollout.batch_size=48", "ckpt=end"),
        *("+algo@env.checked_reverse.algo=echo", "+algo@env.kuhn_poker.algo=rae"),
        "+algo@env.proposer_solver.algo=hierarchical_grpo",
    )
    assert values(run, "trainer", "nll/mean"), "the tool's tokens are members of ce"
    for agent in ("player0", "player1"):
        assert len(values(run, "orchestrator", f"algo/kuhn_poker/baseline/{agent}")) == 2
        assert values(run, "orchestrator", f"train/kuhn_poker/all/{agent}/rewards/chips/mean")
    for agent in ("proposer", "solver"):
        assert values(run, "orchestrator", f"train/proposer_solver/all/{agent}/reward/mean")
    state = (run / "checkpoints" / "step_2" / "orchestrator" / "state.json").read_text()
    assert '"baselines"' in state, "a resumed run goes on from them"
    seats = {(episode["env"], trace["agent"]) for episode in episodes(run) for trace in episode["traces"]}
    assert {agent for env, agent in seats if env == "kuhn_poker"} == {"player0", "player1"}
    tool = next(episode for episode in episodes(run) if episode["env"] == "checked_reverse")
    assert [node["role"] for node in tool["traces"][0]["nodes"]] == ["user", "assistant", "tool", "assistant"]
