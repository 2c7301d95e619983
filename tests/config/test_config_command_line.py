"""The command line as a user meets it: words, exit codes, nothing written, nothing heavy imported."""

from __future__ import annotations

import resource
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from prl import __main__ as program
from prl.config.command_line import parse
from prl.config.errors import ConfigErrors

REPOSITORY = Path(program.__file__).parents[1]
COMMANDS = ["rl", "sft", "export"]
HEAVY = ("torch", "transformers", "deepspeed", "verifiers", "mlflow", "aiohttp", "zmq", "numpy")


def test_words_are_sorted() -> None:
    words = [
        "sft",
        "a=1",
        "-m",
        "--config-dir",
        "d",
        "--cfg=job",
        "+b=2",
        "~c",
        "--info",
        "defaults",
        "--dry-run",
    ]
    line = parse(words, COMMANDS)
    assert (line.command, line.named, line.multirun) == ("sft", True, True)
    assert line.overrides == ["a=1", "+b=2", "~c", "dry_run=true"]
    assert (line.config_dirs, line.config_name) == (["d"], None)
    assert line.hydra_flags == ["--cfg", "job", "--info", "defaults"]


@pytest.mark.parametrize(
    ("words", "command", "overrides", "flags"),
    [
        ([], "rl", [], []),
        (["algo=opd"], "rl", ["algo=opd"], []),
        (["+experiment=x"], "rl", ["+experiment=x"], []),
        (["export", "run=x"], "export", ["run=x"], []),
        (
            ["-c", "job", "--resolve", "-p", "zero"],
            "rl",
            [],
            ["--cfg", "job", "--resolve", "--package", "zero"],
        ),
        (["--info", "seed=1"], "rl", ["seed=1"], ["--info"]),
    ],
)
def test_commands_and_flags(words: list[str], command: str, overrides: list[str], flags: list[str]) -> None:
    line = parse(words, COMMANDS)
    assert (line.command, line.overrides, line.hydra_flags) == (command, overrides, flags)


@pytest.mark.parametrize("word", ["-h", "--help", "--version"])
def test_own_flags(word: str) -> None:
    assert parse([word], COMMANDS).flags <= {"--help", "--version"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rll"], "command = rll: no such command. Nearest: rl; valid: export, rl, sft."),
        (["train", "--mutirun"], "--mutirun: no such flag. Nearest: --multirun;"),
        (["--config-dir"], "--config-dir: a value must follow."),
        (["-cd", "a", "-cd", "b"], "--config-dir: given more than once."),
        (["--lr", "3"], "--lr: no such flag."),
    ],
)
def test_bad_flags_are_told(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        parse(words, COMMANDS)
    assert expected in str(caught.value)


def test_jobs_get_the_config_and_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple] = []
    jobs = types.ModuleType("jobs")
    jobs.launch = lambda *arguments: calls.append(arguments) or 7
    jobs.export = lambda *arguments: calls.append(arguments) or 0
    monkeypatch.setitem(sys.modules, "jobs", jobs)
    monkeypatch.setattr(program, "COMMANDS", {"rl": "jobs:launch", "export": "jobs:export"})
    assert program.main(["optim.lr=1e-3", "run.name='two words'"]) == 7
    assert program.main(["export", "run=."]) == 0
    (config, command_line), (export, exporting) = calls
    assert (config.optim.lr, config.run.name, export.run) == (1e-3, "two words", ".")
    assert shlex.split(command_line) == ["python", "-m", "prl", "optim.lr=1e-3", "run.name='two words'"]
    assert exporting == "python -m prl export run=."


def test_refusals_end_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["algo=gpro", "optim.lrr=1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(":")[0] for line in captured.err.splitlines()] == ["algo = gpro", "optim.lrr = 1"]


def test_help_lists_groups_options_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--help"]) == 0
    text = capsys.readouterr().out
    for part in (
        "* grpo ",
        "icepop",
        "rollout.batch_size = 128",
        "(int ≥ 1)",
        "env.<name>.ratio",
        "--multirun",
    ):
        assert part in text
    assert program.main(["sft", "--help"]) == 0
    text = capsys.readouterr().out
    assert "tiny_warm_start" in text and "rollout.batch_size" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == "prl 0.1.0\n"


def run_prl(*words: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], float]:
    """A real process in an empty directory: its result and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-m", "prl", *words],
        cwd=cwd,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return result, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    ("words", "code", "stream", "expected"),
    [
        (["algo=gpro"], 2, "stderr", "algo = gpro: no such option. Nearest: grpo"),
        (["--multirun", "optim.lr=1e-4,-1", "max_steps=3"], 2, "stderr", "optim.lr = -1"),
        (["--cfg", "job", "algo=gpro"], 2, "stderr", "Nearest: grpo"),
        (["--cfg", "job", "--resolve"], 0, "stdout", "group_size: 16"),
        (["--info", "defaults"], 0, "stdout", "recipe/rl/tiny"),
        (["dry_run=true", "run.name=mine"], 0, "stdout", "outputs/mine"),
        (["--dry-run", "--multirun", "zero=1,2"], 0, "stdout", "element 1 of 2"),
    ],
)
def test_a_process_answers_quickly_and_writes_nothing(
    tmp_path: Path, words: list[str], code: int, stream: str, expected: str
) -> None:
    result, seconds = run_prl(*words, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert expected in getattr(result, stream)
    assert "Traceback" not in result.stderr + result.stdout
    assert list(tmp_path.iterdir()) == []
    assert seconds < 3, "1.5 s of CPU time on a machine of its own"


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    calls = [["dry_run=true"], ["--help"], ["algo=gpro"], ["sft", "dry_run=true"]]
    code = f"""
import sys
from prl.__main__ import main
print([main(words) for words in {calls}], set({HEAVY}) & set(sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.splitlines()[-1] == "[0, 0, 2, 0] set()", result.stdout[-300:] + result.stderr
