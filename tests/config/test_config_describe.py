"""The plan says what feeds the loss, what rules it, and where the run goes."""

from __future__ import annotations

from pathlib import Path

from prl.config.compose import compose_job
from prl.config.describe import components, describe_plan


def test_the_default_plan(rl) -> None:
    plan = dict(line.split(maxsplit=1) for line in describe_plan(rl("run.name=mine")).splitlines())
    assert plan["model"] == "tiny (bundled with prl)"
    assert plan["algo"] == "grpo"
    assert plan["loss"] == "rl by ipo"
    assert plan["env"] == "reverse_text"
    assert plan["batch"].startswith("128 rollouts, groups of 16, at most 2 steps off policy")
    assert "1 embedded engine" in plan["processes"] and "1 trainer rank (ZeRO 1)" in plan["processes"]
    assert plan["steps"] == "to 30"
    assert plan["directory"] == str(Path("outputs/mine").absolute())


def test_components_name_their_rule(rl) -> None:
    teacher = "algo.teacher.model=tiny"
    assert components(rl("loss=icepop")) == ["rl by icepop"]
    assert components(rl("algo=opd", teacher, "loss=ppo")) == ["ref_kl by ppo"]
    assert components(rl("algo=opd", teacher, "loss.ref_kl=one_sided")) == ["ref_kl by the one-sided rule"]
    assert components(rl("algo=opsd")) == ["ref_kl by ipo"]
    assert components(rl("algo=sft", teacher)) == ["ce: cross-entropy, which the loss does not touch"]
    assert components(rl("algo=echo"))[0] == "rl by ipo" and len(components(rl("algo=echo"))) == 2


def test_mixed_environments_and_algorithms(rl) -> None:
    words = ["env=[reverse_text,arithmetic]", "env.arithmetic.ratio=3", "+algo@env.arithmetic.algo=opd"]
    plan = describe_plan(
        rl(*words, "env.arithmetic.algo.teacher.model=tiny", "cluster.train_ranks=2", "ckpt=interval")
    )
    assert "reverse_text 25%, arithmetic 75%" in plan
    assert "grpo; opd for arithmetic, teacher tiny (served by this run)" in plan
    assert "rl by ipo; ref_kl by ipo" in plan
    assert "2 trainer ranks" in plan
    assert "every 10 steps and at the end" in plan


def test_a_resumed_run_without_end(rl) -> None:
    plan = describe_plan(
        rl("run.name=x", "run.resume=latest", "max_steps=null", "scheduler=linear", "scheduler.decay_steps=0")
    )
    assert "no end" in plan and "resumes from latest" in plan and "linear after 10 steps of warm-up" in plan


def test_a_supervised_plan() -> None:
    plan = describe_plan(compose_job("sft", ["experiment=tiny_warm_start"]))
    assert "random weights" in plan and "warm_start, 32 samples a step (fit)" in plan and "muon, lr " in plan
    assert "ce: cross-entropy" in plan and "engine" not in plan
