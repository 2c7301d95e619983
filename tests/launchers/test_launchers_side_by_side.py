"""Local sweeps: several elements side by side, and values that Optuna chooses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus

from launchers.sweeps import side_by_side
from launchers.sweeps.book import Book, Record
from launchers.sweeps.side_by_side import run_all, shares

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="pip install optuna")


class Dummy:
    """An element that sleeps, notes when it ran, and ends with its second override as exit code."""

    def __init__(self, sweep: Path) -> None:
        self.sweep, self.book = sweep, Book(sweep)

    def words(self, overrides: Sequence[str], number: int) -> list[str]:
        return list(overrides)

    def note(
        self, number: int, overrides: Sequence[str], code: int, *, log: str | None = None
    ) -> float | None:
        self.book.record(Record(number, list(overrides), code, float(number), log=log))
        return float(number)

    def finished(self, number: int) -> Record | None:
        record = self.book.of(number)
        return record if record and record.finished else None


@pytest.fixture
def element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dummy:
    """`python -m prl <marker> <code>` is replaced by a script of some tenths of a second."""
    script = tmp_path / "prl.py"
    script.write_text(
        "import os, sys, time, pathlib\n"
        "seen = pathlib.Path(sys.argv[1]); seen.write_text(os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))\n"
        "time.sleep(float(sys.argv[3])); sys.exit(int(sys.argv[2]))\n"
    )

    def popen(words: list[str], **options: Any) -> Any:
        assert words[1:3] == ["-m", "prl"]
        return subprocess.Popen([sys.executable, "-S", str(script), *words[3:]], **options)

    monkeypatch.setattr(side_by_side, "subprocess", SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL))
    return Dummy(tmp_path / "sweep")


def test_elements_run_side_by_side_and_a_failed_one_hides_nobody(element: Dummy, tmp_path: Path) -> None:
    numbered = {n: [str(tmp_path / f"seen_{n}"), str(3 if n == 1 else 0), "0.1"] for n in range(4)}
    assert run_all(element, numbered, 2) == {0: 0.0, 1: None, 2: 2.0, 3: 3.0}
    records = element.book.records()
    assert [records[n].code for n in range(4)] == [0, 3, 0, 0]
    assert all(Path(record.log or "").exists() for record in records.values())
    element.book.forget(2)
    for n in range(4):
        (tmp_path / f"seen_{n}").unlink()
    run_all(element, {n: words for n, words in numbered.items() if n != 1}, 2)
    assert [(tmp_path / f"seen_{n}").exists() for n in range(4)] == [False, False, True, False]


def test_no_more_than_the_bound_are_at_work(element: Dummy, tmp_path: Path) -> None:
    numbered = {n: [str(tmp_path / f"seen_{n}"), "0", "0.5"] for n in range(4)}
    thread = threading.Thread(target=run_all, args=(element, numbered, 2))
    thread.start()
    most = 0
    while thread.is_alive():
        started = len(list(tmp_path.glob("seen_*")))
        most = max(most, started - len(element.book.records()))
        time.sleep(0.02)
    assert most <= 2 and len(element.book.records()) == 4


def test_each_slot_has_its_share_of_the_gpus(
    element: Dummy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shares(["0", "1", "2", "3"], 2) == [["0", "1"], ["2", "3"]] and shares([], 2) == [None, None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    run_all(element, {n: [str(tmp_path / f"seen_{n}"), "0", "0.3"] for n in range(2)}, 2)
    assert {(tmp_path / f"seen_{n}").read_text() for n in range(2)} == {"4", "6"}


class Batches:
    """A Hydra launcher that computes: the objective is -(lr - 0.3)^2, lr above 0.9 fails."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, list[list[str]]]] = []

    def launch(self, batch: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
        self.launched.append((initial_job_idx, batch))
        returned = []
        for words in batch:
            lr = float(dict(word.split("=") for word in words)["optim.lr"])
            done = JobReturn(overrides=words, status=JobStatus.COMPLETED if lr < 0.9 else JobStatus.FAILED)
            done.return_value = -((lr - 0.3) ** 2) if lr < 0.9 else RuntimeError("too large")
            returned.append(done)
        return returned


OPTIONS = {
    "sampler": "tpe",
    "direction": "maximize",
    "n_trials": 7,
    "n_jobs": 3,
    "storage": None,
    "study_name": None,
    "seed": 0,
    "max_failure_rate": 1.0,
}


@needs_optuna
def test_optuna_asks_in_batches_and_the_same_command_repeats_nothing(tmp_path: Path) -> None:
    from launchers.sweeps.search import search

    launcher = Batches()
    search(["max_steps=3", "optim.lr=interval(0.0,1.0)"], OPTIONS, str(tmp_path), launcher)
    assert [(first, len(batch)) for first, batch in launcher.launched] == [(0, 3), (3, 3), (6, 1)]
    assert all(words[0] == "max_steps=3" for _, batch in launcher.launched for words in batch)
    again = Batches()
    search(["max_steps=3", "optim.lr=interval(0.0,1.0)"], OPTIONS, str(tmp_path), again)
    assert again.launched == []
    search(["optim.lr=interval(0.0,1.0)"], {**OPTIONS, "n_trials": 9}, str(tmp_path), again)
    assert [(first, len(batch)) for first, batch in again.launched] == [(7, 2)]


@needs_optuna
def test_trials_that_were_at_work_when_a_search_was_ended_go_on_first(tmp_path: Path) -> None:
    from launchers.sweeps.search import search

    class Interrupted(Batches):
        def launch(self, batch: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
            super().launch(batch, initial_job_idx)
            raise KeyboardInterrupt

    first, second = Interrupted(), Batches()
    with pytest.raises(KeyboardInterrupt):
        search(["optim.lr=interval(0.0,1.0)"], OPTIONS, str(tmp_path), first)
    search(["optim.lr=interval(0.0,1.0)"], OPTIONS, str(tmp_path), second)
    assert second.launched[0] == first.launched[0], "the same numbers with the same values"
    assert sum(len(batch) for _, batch in second.launched) == 7


@needs_optuna
def test_failed_trials_run_again_when_the_command_is_given_again(tmp_path: Path) -> None:
    from launchers.sweeps.search import search

    class Failing(Batches):
        def launch(self, batch: list[list[str]], initial_job_idx: int) -> list[JobReturn]:
            done = super().launch(batch, initial_job_idx)
            for element in done:
                element._return_value = None
            return done

    first, second, third = Failing(), Batches(), Batches()
    space = ["optim.lr=interval(0.0,0.5)"]
    search(space, OPTIONS, str(tmp_path), first)
    search(space, OPTIONS, str(tmp_path), second)
    assert first.launched == second.launched, "the same numbers and values, in batches as large"
    search(space, OPTIONS, str(tmp_path), third)
    assert third.launched == []


@needs_optuna
def test_a_grid_ends_with_its_last_point_and_random_takes_intervals(tmp_path: Path) -> None:
    from launchers.sweeps.search import search

    grid = Batches()
    search(["optim.lr=0.1,0.2", "seed=1,2"], {**OPTIONS, "sampler": "grid"}, str(tmp_path / "g"), grid)
    points = {tuple(sorted(words)) for _, batch in grid.launched for words in batch}
    assert len(points) == 4
    random = Batches()
    words = ["optim.lr=tag(log,interval(0.01,1.0))"]
    search(words, {**OPTIONS, "sampler": "random"}, str(tmp_path / "r"), random)
    values = [float(w[0].split("=")[1]) for _, batch in random.launched for w in batch]
    assert len(set(values)) == 7 and all(0.01 <= value <= 1.0 for value in values)
    with pytest.raises(ValueError, match="a grid needs a list"):
        search(words, {**OPTIONS, "sampler": "grid"}, str(tmp_path / "x"), grid)
    with pytest.raises(ValueError, match=r"hydra.sweeper.sampler = tpa: valid: tpe"):
        search(words, {**OPTIONS, "sampler": "tpa"}, str(tmp_path / "x"), grid)


@needs_optuna
def test_too_many_failures_end_the_search(tmp_path: Path) -> None:
    from launchers.sweeps.search import search

    with pytest.raises(RuntimeError, match="trials failed"):
        search(["optim.lr=0.95,0.99"], {**OPTIONS, "max_failure_rate": 0.5}, str(tmp_path), Batches())
