from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launchers import placement
from launchers.run import launch_rl
from prl.config.loss import CustomLossConfig
from prl.config.schema import LogConfig, RlConfig
from prl.config.serving import ClusterConfig

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("launch_dummies.py")
SERVERS = [["inference", "server", "serve"], ["env/x", "server", "family", "RUN/pids"]]
ENDLESS = [*SERVERS, ["orchestrator", "job", "steps", "RUN"], ["trainer/0", "job", "work", "600"]]


@dataclass
class Launched:
    """A launcher at work in its own process, its output, and its run directory."""

    process: subprocess.Popen[str]
    output: Path
    run: Path

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ended(self, timeout: float = 15) -> tuple[int, str]:
        return self.process.wait(timeout), self.output.read_text()


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def start(tmp_path: Path, wait_until: Callable) -> Iterator[Callable[..., Launched]]:
    """Start a launcher; with `until`, wait until its run has trained so many steps."""
    launched: list[Launched] = []

    def launch(roles: list[list[str]], until: int = 0, display: str = "plain", grace: int = 1) -> Launched:
        output = tmp_path / f"output_{len(launched)}"
        argv = [
            sys.executable,
            str(DRIVER),
            str(tmp_path / "outputs"),
            json.dumps(roles),
            display,
            str(grace),
        ]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        with output.open("w") as out:
            process = subprocess.Popen(argv, env=environ, stdout=out, stderr=subprocess.STDOUT, text=True)
        found = Launched(process, output, tmp_path / "outputs" / "r")
        launched.append(found)
        if until:
            stream = found.run / "metrics" / "trainer.jsonl"
            wait_until(lambda: stream.exists() and len(stream.read_text().splitlines()) >= until, 30)
            wait_until((found.run / "pids").exists)
        return found

    yield launch
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_ctrl_c_ends_everything_with_130(start: Callable[..., Launched]) -> None:
    launched = start(ENDLESS, until=3)
    family = launched.family()
    assert len(family) == 7, "four roles, the guard, a worker and its worker"
    launched.process.send_signal(signal.SIGINT)
    asked_at = time.monotonic()
    code, output = launched.ended()
    assert code == 130 and time.monotonic() - asked_at < 5 and alive(family) == []
    assert "killed at step" in output and "received SIGINT" in output
    assert "ended: KILLED" in (launched.run / "STATUS.md").read_text()


def test_sigterm_ends_everything_with_143(start: Callable[..., Launched]) -> None:
    launched = start(ENDLESS, until=1)
    family = launched.family()
    launched.process.terminate()
    code, _ = launched.ended()
    assert code == 143 and alive(family) == []


def test_a_second_ctrl_c_does_not_wait_for_the_grace(
    start: Callable[..., Launched], wait_until: Callable
) -> None:
    launched = start([["inference", "server", "stubborn"], *ENDLESS], until=1, grace=60)
    family = launched.family()
    launched.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launched.process.send_signal(signal.SIGINT)
    asked_at = time.monotonic()
    code, _ = launched.ended()
    assert code == 130 and time.monotonic() - asked_at < 10
    assert alive(family) == []


def test_kill_9_of_the_launcher_leaves_nobody(start: Callable[..., Launched], wait_until: Callable) -> None:
    launched = start(ENDLESS, until=1)
    family = launched.family()
    assert len(family) == 7
    launched.process.kill()
    launched.process.wait()
    wait_until(lambda: alive(family) == [], 5)


def test_kill_9_of_a_child_is_told_with_its_log(start: Callable[..., Launched]) -> None:
    launched = start(ENDLESS, until=2)
    family = launched.family()
    victim = next(p for p in family if p.cmdline()[-1] == "serve")
    victim.kill()
    killed_at = time.monotonic()
    code, output = launched.ended()
    assert code == 1 and time.monotonic() - killed_at < 5 and alive(family) == []
    assert "the run failed: inference was killed by SIGKILL" in output
    assert f"--- end of {launched.run}/logs/attempt_1/inference.log ---\nserving" in output
    assert "ended: FAILED\n\n- inference was killed by SIGKILL" in (launched.run / "STATUS.md").read_text()


def test_a_failing_job_is_told_with_its_log(start: Callable[..., Launched]) -> None:
    code, output = start([*SERVERS, ["trainer/0", "job", "fail", "7"]]).ended()
    assert code == 1 and "trainer/0 exited with code 7" in output and "the reason is this" in output


def test_a_run_that_ends_well_sums_itself_up(start: Callable[..., Launched]) -> None:
    launched = start([*SERVERS, ["trainer/0", "job", "work", "0.5"]])
    code, output = launched.ended()
    assert code == 0 and "finished at step 0" in output
    for place in ("", "/logs/attempt_1", "/metrics"):
        assert f"{launched.run}{place}" in output
    log = (launched.run / "logs" / "latest" / "launcher.log").read_text()
    assert "trainer/0 is process" in log and "FINISHED" in log


def test_two_launches_at_once_share_nothing(start: Callable[..., Launched]) -> None:
    roles = [*SERVERS, ["trainer/0", "job", "work", "1"]]
    outcomes = sorted(one.ended() for one in [start(roles), start(roles)])
    assert [code for code, _ in outcomes] == [0, 2]
    assert "run.name = r" in outcomes[1][1]


def test_plain_lines_while_it_runs(start: Callable[..., Launched], wait_until: Callable) -> None:
    launched = start(ENDLESS, until=2)
    wait_until(lambda: "step 2/30" in launched.output.read_text())
    launched.process.terminate()
    _, output = launched.ended()
    assert "step 2/30  reward 0.020" in output
    assert "reward: first" in output


def test_no_line_with_display_none(start: Callable[..., Launched]) -> None:
    launched = start(ENDLESS, until=3, display="none")
    launched.process.terminate()
    _, output = launched.ended()
    assert "step 2/30" not in output and "reward: first" in output


def test_dry_run_shows_the_plan_and_the_placement_and_writes_nothing(
    tmp_path: Path,
    config: Callable[..., RlConfig],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert launch_rl(config(dry_run=True), ["prl"]) == 0
    told = capsys.readouterr().out
    assert "inference on GPU 4, trainer/0 on GPU 5" in told and "env/reverse_text" in told
    assert str(tmp_path / "outputs" / "r") in told and "dry run" in told
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused_is_told_with_code_2_and_writes_nothing(
    tmp_path: Path,
    config: Callable[..., RlConfig],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert launch_rl(config(cluster=ClusterConfig(train_ranks=2)), ["prl"]) == 2
    assert launch_rl(config(run_resume="latest"), ["prl"]) == 2
    errors = capsys.readouterr().err
    assert "cluster.train_ranks = 2" in errors and "no complete checkpoint" in errors
    assert "Traceback" not in errors and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["no_such_package.losses:mine", "json.no_such:mine"])
def test_a_loss_whose_module_is_not_there_starts_nothing(
    tmp_path: Path, config: Callable[..., RlConfig], capsys: pytest.CaptureFixture[str], path: str
) -> None:
    changed = config()
    changed.loss = CustomLossConfig(import_path=path)
    assert launch_rl(changed, ["prl"]) == 2
    assert f"loss.import_path = {path}: there is no module" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_directory_that_cannot_be_made_is_told(
    tmp_path: Path, config: Callable[..., RlConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert launch_rl(config(output_dir=str(tmp_path / "file" / "outputs")), ["prl"]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_a_finished_run_has_nothing_to_resume(
    tmp_path: Path, config: Callable[..., RlConfig], checkpoint: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(tmp_path / "outputs" / "r" / "checkpoints", 30)
    (tmp_path / "outputs" / "r" / "configs" / "attempt_1").mkdir(parents=True)
    assert launch_rl(config(run_resume="latest"), ["prl"]) == 0
    assert "step 30 of 30: there is nothing to do" in capsys.readouterr().out
    assert not (tmp_path / "outputs" / "r" / "configs" / "attempt_2").exists()


def test_several_launches_in_one_process(
    config: Callable[..., RlConfig],
    role: Callable,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    for name, behaviour, code in (
        ("a", ("work", "0.1"), 0),
        ("b", ("fail", "1"), 1),
        ("c", ("work", "0.1"), 0),
    ):
        monkeypatch.setattr(placement, "place", lambda *_, b=behaviour: [role("trainer/0", "job", *b)])
        assert launch_rl(config(run_name=name, log=LogConfig(display="none")), ["prl"]) == code
    assert signal.getsignal(signal.SIGINT) is before
    assert "the run failed: trainer/0 exited with code 1" in capsys.readouterr().err


def test_a_fault_of_the_launcher_itself_ends_all_and_is_raised(
    config: Callable[..., RlConfig], role: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object) -> list[object]:
        return [role("trainer/0", "job", "work", "60"), role("b", "job", "work", "1", env={"bad": 1})]

    monkeypatch.setattr(placement, "place", broken)
    children = set(psutil.Process().children())
    with pytest.raises(TypeError):
        launch_rl(config(log=LogConfig(display="none")), ["prl"])
    assert set(psutil.Process().children()) == children
