from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.role import ENTRY_POINTS, LAUNCHER_VAR, entry_point, main
from prl.config.algo import GrpoConfig
from prl.config.load import dump_resolved
from prl.config.loss import IpoConfig
from prl.config.rules_monitor import PROCESSES
from prl.config.schema import LogConfig, RlConfig
from prl.config.serving import EmbeddedConfig, TrackingConfig
from prl.config.training import AdamWConfig, SchedulerConfig
from prl.log_lines import configure
from prl.run_dir import RunDir

ROOT = Path(__file__).parents[2]


@pytest.fixture
def resolved(run: RunDir) -> Path:
    config = RlConfig(
        algo=GrpoConfig(),
        loss=IpoConfig(),
        optim=AdamWConfig(),
        scheduler=SchedulerConfig(),
        inference=EmbeddedConfig(),
        tracking=TrackingConfig(),
        max_steps=7,
    )
    run.resolved_config.write_text(dump_resolved("rl", config))
    return run.resolved_config


def script(tmp_path: Path, body: str, role: str = "orchestrator") -> list[str]:
    """A process that is `launchers.role` with `body` as the entry point of this role."""
    path = tmp_path / "role_script.py"
    path.write_text(
        "import sys, types, os, signal, time, logging, threading\n"
        "from launchers import role\n"
        "def run(config, run, role):\n" + textwrap.indent(textwrap.dedent(body), "    ") + "\n"
        "module = types.ModuleType('dummy_entry'); module.main = run\n"
        "sys.modules['dummy_entry'] = module\n"
        f"role.ENTRY_POINTS['{role.partition('/')[0]}'] = 'dummy_entry'\n"
        "sys.exit(role.main(sys.argv[1:]))\n"
    )
    return [sys.executable, str(path), role]


def call(argv: list[str], resolved: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run([*argv, str(resolved)], env=environment, capture_output=True, text=True, timeout=30)


def test_the_entry_point_gets_config_run_and_role(tmp_path: Path, resolved: Path) -> None:
    done = call(script(tmp_path, "print(config.max_steps, run.attempt, run.path.name, role)"), resolved)
    assert (done.returncode, done.stdout) == (0, "7 1 run orchestrator\n"), done.stderr


@pytest.mark.parametrize("role", ["trainer/0", "sft/1"])
def test_a_rank_that_is_done_is_not_aborted_by_a_thread_of_its_process_group(
    tmp_path: Path, resolved: Path, role: str
) -> None:
    """Left to the interpreter's own end, this process aborts in about two runs of three."""
    body = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.group_that_stays = dist.group.WORLD
    for _ in range(20):
        tensor = torch.zeros(2_000_000)
        tensor.note = object()
        work = dist.all_reduce(tensor, async_op=True)
        del tensor, work
    dist.destroy_process_group()
    print("all done")
    """
    argv = script(tmp_path, body, role)
    ends = [call(argv, resolved) for _ in range(3)]
    assert [(done.returncode, done.stdout) for done in ends] == [(0, "all done\n")] * 3, ends[0].stderr


def test_an_exception_is_logged_with_its_traceback_and_ends_the_process_with_1(
    tmp_path: Path, resolved: Path
) -> None:
    body = """
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise RuntimeError("the reason")
    """
    began = time.monotonic()
    done = call(script(tmp_path, body), resolved)
    assert done.returncode == 1 and time.monotonic() - began < 15, (
        "a thread that hangs must not delay the end"
    )
    assert "ERROR launchers.role orchestrator failed" in done.stderr
    assert "RuntimeError: the reason" in done.stderr and "Traceback" in done.stderr


def test_the_warning_signal_of_slurm_is_ignored(tmp_path: Path, resolved: Path) -> None:
    done = call(script(tmp_path, "os.kill(os.getpid(), signal.SIGUSR2); print('alive')"), resolved)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_a_role_dies_with_its_launcher(
    tmp_path: Path, resolved: Path, wait_until: Callable, gone: Callable[[int], bool]
) -> None:
    pid_file = tmp_path / "pid"
    argv = script(tmp_path, f"open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    launcher = textwrap.dedent(f"""
        import os, subprocess, time
        env = {{**os.environ, {LAUNCHER_VAR!r}: str(os.getpid())}}
        subprocess.Popen({[*argv, str(resolved)]!r}, env=env, start_new_session=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", launcher], env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    pid = int(pid_file.read_text())
    assert not gone(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: gone(pid), 3.0)


def test_a_role_whose_launcher_is_gone_already_does_not_start(tmp_path: Path, resolved: Path) -> None:
    done = call(script(tmp_path, "print('started')"), resolved, **{LAUNCHER_VAR: "1"})
    assert done.returncode == 1 and "launcher is gone" in done.stderr and done.stdout == ""


def test_log_lines_have_time_level_name_and_message(capfd: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(level="info"), "trainer/0")
    logging.getLogger("prl.x").info("hello")
    logging.getLogger("prl.x").debug("too much")
    logging.getLogger("httpx").info("other people's chatter")
    logging.getLogger("httpx").warning("other people's warnings")
    logging.captureWarnings(False)
    first, second = capfd.readouterr().err.splitlines()
    clock, level, name, message = first.split(" ", 3)
    assert (len(clock), clock[2], level, name, message) == (8, ":", "INFO", "prl.x", "hello")
    assert second.endswith("WARNING httpx other people's warnings")


def test_every_kind_of_role_has_an_entry_point_module() -> None:
    assert set(ENTRY_POINTS) == {
        "inference",
        "teacher",
        "env",
        "orchestrator",
        "trainer",
        "sft",
        "evals",
        "eval",
    }
    assert set(PROCESSES) == {"launcher", *ENTRY_POINTS}  # those that may have a log level
    with pytest.raises(ValueError, match="role 'walrus/0' is unknown"):
        entry_point("walrus/0")


def test_wrong_usage_is_told() -> None:
    with pytest.raises(SystemExit, match="usage"):
        main(["orchestrator"])
