from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.run_directory import append_status, open_run, plan_run
from prl.config.load import load_resolved
from prl.config.schema import RlConfig
from prl.config.training import CkptConfig, CosineConfig, LinearConfig
from prl.run_dir import RunDir
from prl.tracking.reader import read_metrics

Make = Callable[..., RlConfig]
LINE = ["python", "-m", "prl", "optim.lr=1e-4", "run.name=two words"]


def launch(config: RlConfig) -> RunDir:
    """One attempt, over at once."""
    with open_run("rl", config, plan_run(config), LINE) as run:
        return run


def snapshot(path: Path) -> dict[Path, tuple[int, int]]:
    return {entry: (entry.lstat().st_mtime_ns, entry.lstat().st_size) for entry in path.rglob("*")}


def test_a_new_run_has_its_attempt_config_command_and_links(tmp_path: Path, config: Make) -> None:
    run = launch(config())
    assert (run.path, run.attempt) == (tmp_path / "outputs" / "r", 1)
    command, loaded = load_resolved(run.resolved_config)
    assert command == "rl" and loaded.run.name == "r" and loaded.run.resume is None
    assert (
        (run.configs / "command.txt")
        .read_text()
        .startswith("python -m prl optim.lr=1e-4 'run.name=two words'\n")
    )
    assert (run.path / "logs" / "latest").readlink() == Path("attempt_1")
    assert (run.path / "configs" / "latest" / "resolved.yaml").is_file()
    assert RunDir.from_resolved(run.path / "configs" / "latest" / "resolved.yaml") == run


def test_the_output_directory_of_the_resolved_config_is_absolute(
    tmp_path: Path, config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = launch(config(output_dir="here"))
    assert run.path == tmp_path / "here" / "r"
    assert load_resolved(run.resolved_config)[1].output_dir == str(tmp_path / "here")


def test_planning_writes_nothing(tmp_path: Path, config: Make) -> None:
    plan = plan_run(config())
    assert not plan.continues and plan.origin() == "starts from scratch" and list(tmp_path.iterdir()) == []


def test_an_existing_name_is_refused_and_nothing_is_touched(tmp_path: Path, config: Make) -> None:
    launch(config())
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"run.name = r: .* exists.*run.resume=latest.*run.clean=true"):
        plan_run(config())
    assert snapshot(tmp_path) == before


def test_an_empty_directory_is_free(tmp_path: Path, config: Make) -> None:
    (tmp_path / "outputs" / "r").mkdir(parents=True)
    assert launch(config()).attempt == 1


def test_resume_makes_the_next_attempt_with_the_checkpoint_as_absolute_path(
    config: Make, checkpoint: Callable
) -> None:
    run = launch(config())
    for step in (5, 10):
        checkpoint(run.checkpoints, step)
    again = launch(config(run_resume="latest"))
    assert again.attempt == 2 and (run.path / "logs" / "latest").readlink() == Path("attempt_2")
    resolved = load_resolved(again.resolved_config)[1]
    assert resolved.run.resume == str(run.checkpoints / "step_10")
    assert plan_run(config(run_resume="5")).resume_step == 5


def test_a_schedule_that_starts_anew_must_fit_into_what_is_left(config: Make, checkpoint: Callable) -> None:
    run = launch(config())
    for step in (5, 9, 12):
        checkpoint(run.checkpoints, step)

    def resume(at: str, skip: bool, **scheduler: object) -> int:
        ckpt, linear = CkptConfig(skip_scheduler=skip), LinearConfig(**scheduler)  # type: ignore[arg-type]
        made = config(run_resume=at, max_steps=12, ckpt=ckpt)
        return plan_run(replace(made, scheduler=linear)).resume_step

    assert resume("5", True, warmup_steps=3, decay_steps=4) == 5
    assert resume("9", False, warmup_steps=3, decay_steps=4) == 9
    assert resume("12", True, warmup_steps=3, decay_steps=4) == 12, "at its end there is nothing to schedule"
    told = r"scheduler.warmup_steps = 3: .* 3 \+ 4 steps, the run has 3 of max_steps = 12 left at step 9"
    with pytest.raises(ValueError, match=told):
        resume("9", True, warmup_steps=3, decay_steps=4)
    made = config(run_resume="9", max_steps=12, ckpt=CkptConfig(skip_scheduler=True))
    cosine = replace(made, scheduler=CosineConfig(warmup_steps=3))
    with pytest.raises(ValueError, match=r"the warm-up takes all of 3 of max_steps = 12 left"):
        plan_run(cosine)
    assert not (run.path / "configs" / "attempt_2").exists()


def test_resume_of_what_is_not_there_is_refused(tmp_path: Path, config: Make, checkpoint: Callable) -> None:
    with pytest.raises(ValueError, match="no complete checkpoint"):
        plan_run(config(run_resume="latest"))
    run = launch(config())
    checkpoint(run.checkpoints, 5)
    with pytest.raises(ValueError, match=r"step 7.*: 5"):
        plan_run(config(run_resume="7"))
    assert not (run.path / "configs" / "attempt_2").exists()


def test_what_is_newer_than_the_resume_step_is_set_aside(config: Make, checkpoint: Callable) -> None:
    run = launch(config())
    for step in (5, 10):
        checkpoint(run.checkpoints, step)
    (run.broadcasts / "step_9").mkdir(parents=True)
    run.metrics.mkdir()
    lines = [
        json.dumps({"producer": "trainer", "step": s, "time": float(s), "loss/mean": s}) for s in (4, 5, 6)
    ]
    run.metric_file("trainer").write_text("\n".join(lines) + '\n{"producer": "trainer", "step": 7, "ti')
    launch(config(run_resume="5"))
    assert not run.broadcasts.exists()
    records = read_metrics(run.metrics)
    assert [record.step for record in records if record.values] == [4, 5]
    assert [(record.attempt, record.resumed_from) for record in records if not record.values] == [(2, 5)]
    assert plan_run(config(run_resume="latest")).resume_step == 5, "step 10 is of a timeline that was left"


def test_fork_of_another_runs_checkpoint_needs_a_new_name(
    tmp_path: Path, config: Make, checkpoint: Callable
) -> None:
    source = checkpoint(launch(config(run_name="other")).checkpoints, 3)
    fork = launch(config(run_resume=str(source)))
    assert fork.attempt == 1 and load_resolved(fork.resolved_config)[1].run.resume == str(source)
    assert source.is_dir()
    with pytest.raises(ValueError, match="not of the run"):
        plan_run(config(run_resume=str(source)))


def test_clean_replaces_a_run_only(tmp_path: Path, config: Make) -> None:
    run = launch(config())
    (run.path / "old").write_text("x")
    fresh = launch(config(run_clean=True))
    assert fresh.attempt == 1 and not (fresh.path / "old").exists()
    assert [entry.name for entry in (tmp_path / "outputs").iterdir()] == ["r"], "nothing half deleted stays"
    precious = tmp_path / "outputs" / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"run.clean = true: .*precious is not a run"):
        plan_run(config(run_name="precious", run_clean=True))
    assert (precious / "thesis.tex").exists()


def test_clean_never_leaves_the_output_directory(tmp_path: Path, config: Make) -> None:
    elsewhere = launch(config(output_dir=str(tmp_path / "elsewhere")))
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "r").symlink_to(elsewhere.path)
    with pytest.raises(ValueError, match="does not lie in output_dir"):
        plan_run(config(run_clean=True))
    assert elsewhere.resolved_config.exists()


def test_clean_does_not_delete_what_it_resumes_from(config: Make, checkpoint: Callable) -> None:
    source = checkpoint(launch(config()).checkpoints, 3)
    with pytest.raises(ValueError, match="would delete the checkpoint"):
        plan_run(config(run_clean=True, run_resume=str(source)))


def test_a_separate_checkpoint_directory_is_not_shared_by_accident(
    tmp_path: Path, config: Make, checkpoint: Callable
) -> None:
    checkpoint(tmp_path / "ckpts", 3)
    with pytest.raises(ValueError, match=r"ckpt.dir = .* holds checkpoints of another run"):
        plan_run(config(ckpt=CkptConfig(dir=str(tmp_path / "ckpts"))))
    plan = plan_run(config(ckpt=CkptConfig(dir=str(tmp_path / "ckpts")), run_resume="latest"))
    assert plan.resume_step == 3 and not plan.continues


def test_a_second_launcher_of_a_live_run_is_refused(config: Make, checkpoint: Callable) -> None:
    first = config()
    with open_run("rl", first, plan_run(first), LINE) as run:
        checkpoint(run.checkpoints, 3)
        for second in (config(run_resume="latest"), config(run_clean=True)):
            with (
                pytest.raises(ValueError, match="another launcher is at work"),
                open_run("rl", second, plan_run(second), LINE),
            ):
                raise AssertionError
        assert not (run.path / "configs" / "attempt_2").exists() and run.resolved_config.exists()
    assert launch(config(run_resume="latest")).attempt == 2, "the lock went with its holder"


def test_attempt_numbers_are_never_reused(config: Make, checkpoint: Callable) -> None:
    run = launch(config())
    checkpoint(run.checkpoints, 1)
    (run.path / "logs" / "attempt_4").mkdir()
    assert launch(config(run_resume="latest")).attempt == 5


def _race(config: RlConfig, barrier: object, results: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    try:
        with open_run("rl", config, plan_run(config), LINE) as run:
            barrier.wait()  # type: ignore[attr-defined]
            results.put((os.getpid(), run.attempt))  # type: ignore[attr-defined]
    except ValueError as error:
        barrier.wait()  # type: ignore[attr-defined]
        results.put((os.getpid(), str(error)))  # type: ignore[attr-defined]


def test_of_launches_at_the_same_moment_one_gets_the_name(tmp_path: Path, config: Make) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(3):
        barrier, results = context.Barrier(4), context.Queue()
        racers = [
            context.Process(target=_race, args=(config(run_name=f"r{turn}"), barrier, results))
            for _ in range(4)
        ]
        for racer in racers:
            racer.start()
        outcomes = [results.get(timeout=20)[1] for _ in racers]
        for racer in racers:
            racer.join(20)
        assert outcomes.count(1) == 1
        assert all("r" in outcome for outcome in outcomes if outcome != 1)
        assert len(list((tmp_path / "outputs" / f"r{turn}" / "configs").glob("attempt_*"))) == 1


def test_status_is_a_diary(tmp_path: Path, config: Make) -> None:
    run = launch(config())
    append_status(run, "started", ["from scratch", ""])
    first = (run.path / "STATUS.md").read_text()
    append_status(RunDir(run.path, 2), "ended: FAILED", ["trainer/0 was killed by SIGKILL"])
    text = (run.path / "STATUS.md").read_text()
    assert text.startswith(first) and text.splitlines()[0] == "# r"
    assert "attempt 1 started" in text and "- from scratch\n" in text
    assert "attempt 2 ended: FAILED\n\n- trainer/0 was killed by SIGKILL\n" in text


def test_a_copied_run_directory_can_be_resumed_elsewhere(
    tmp_path: Path, config: Make, checkpoint: Callable
) -> None:
    run = launch(config())
    checkpoint(run.checkpoints, 2)
    shutil.copytree(tmp_path / "outputs", tmp_path / "moved", symlinks=True)
    again = launch(config(output_dir=str(tmp_path / "moved"), run_resume="latest"))
    assert again.attempt == 2
    assert load_resolved(again.resolved_config)[1].run.resume == str(tmp_path / "moved/r/checkpoints/step_2")
