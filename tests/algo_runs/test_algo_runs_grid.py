"""Every algorithm with every loss as the user types it: what is valid runs, the rest says why."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from algo_run_lab import SMALL, prl

from launchers.placement import place
from prl.config.compose import compose_job
from prl.config.describe import components
from prl.config.errors import ConfigErrors

ALGORITHMS = {
    "grpo": "rl",
    "max_rl": "rl",
    "rae": "rl",
    "hierarchical_grpo": "rl",
    "echo": "rl",
    "opd": "ref_kl",
    "opsd": "ref_kl",
    "sft": "ce",
}
LOSSES = ("ipo", "icepop", "ppo", "cispo")
GRID = list(product(ALGORITHMS, LOSSES))
NEEDS_SEATS = (
    "algo.name = hierarchical_grpo: env.reverse_text has one agent; hierarchical_grpo compares several."
)


def words_of(algorithm: str, loss: str) -> list[str]:
    """The command of a cell. hierarchical_grpo is valid where an environment has several agents."""
    env = ["env=[proposer_solver]"] if algorithm == "hierarchical_grpo" else []
    return [f"algo={algorithm}", f"loss={loss}", *env, *SMALL]


@pytest.mark.parametrize(("algorithm", "loss"), GRID)
def test_a_valid_cell_composes_and_has_a_placement(algorithm: str, loss: str, tmp_path: Path) -> None:
    config = compose_job("rl", words_of(algorithm, loss))
    component = ALGORITHMS[algorithm]
    ruled_by = "cross-entropy" if component == "ce" else f"by {loss}"
    assert components(config)[0].startswith(component) and ruled_by in components(config)[0]
    roles = [role.name for role in place("rl", config, tmp_path, [])]
    assert ("teacher/shared" in roles) == (algorithm in ("opd", "sft"))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_cell_without_several_agents_is_refused_in_one_line(loss: str) -> None:
    with pytest.raises(ConfigErrors) as refused:
        compose_job("rl", ["algo=hierarchical_grpo", f"loss={loss}", "max_steps=2"])
    (problem,) = refused.value.problems
    assert str(problem).startswith(NEEDS_SEATS) and "\n" not in str(problem)
    assert "env=[proposer_solver]" in str(problem), "the remedy"


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(("algorithm", "loss"), GRID)
def test_a_valid_cell_runs(algorithm: str, loss: str, tmp_path: Path) -> None:
    done = prl(tmp_path, *words_of(algorithm, loss))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.e2e
def test_a_sweep_over_algorithms_and_losses(tmp_path: Path) -> None:
    words = ["--multirun", "algo=grpo,max_rl", "loss=ipo,icepop,ppo,cispo", *SMALL]
    done = prl(tmp_path, *words, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = list((tmp_path / "multirun").rglob("resolved.yaml"))
    assert len(runs) == 8
