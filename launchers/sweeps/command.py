"""`--multirun`: from checked elements to a finished sweep: where it lies, who launches it, what it told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.slurm.queue import active
from launchers.sweeps.book import Book, find
from launchers.sweeps.element import INTERRUPTED, Element, Job
from launchers.sweeps.over_slurm import LAUNCHER, array_request, check_array, describe_array, one_cluster
from launchers.sweeps.tell import lines_of, table, tell
from prl.config.command_line import CommandLine
from prl.config.errors import NO_VALUE, ConfigErrors, Problem
from prl.config.overrides import quoted

LAUNCHERS = {"slurm": LAUNCHER, "local": "prl_local"}


@dataclass(frozen=True)
class HydraFacts:
    """What the composed options say of the sweep itself.

    `batch`: elements that run at a time where a sweeper chooses them as it goes; None where all are known.
    """

    directory: Path
    launcher: str
    batch: int | None


def run_sweep(line: CommandLine, job: Job, configs: list[Any], elements: list[list[str]]) -> int:
    """Run every element that is not finished yet; the exit code: that of the first that failed, or 0.

    `configs`: of the elements that are known before any runs. `elements`: their overrides.
    Raises ConfigErrors.
    """
    from prl.config import hydra_app

    facts = hydra_facts(line)
    refuse_double_axes(elements)
    cluster = one_cluster(configs)
    sampled = facts.batch is not None
    earlier = began_earlier(line, facts)
    directory = (earlier or facts.directory).resolve()
    request = None
    if cluster.name == "slurm":
        request = array_request(line, cluster, facts.launcher, directory, cluster.wait or sampled)
        check_array(request, line.command, cluster, configs, facts.batch or len(elements))
    book = open_book(line, directory, None if sampled else elements)
    if at_work := still_at_work(book):
        print(table(lines_of(book)))
        print(f"at work: {' '.join(at_work)}; nothing was submitted")
        return 0
    for record in book.records().values():
        if not record.finished:
            book.forget(record.number)
    asked = {"request": request.wanted, "typed": request.typed} if request else {}
    element = Element(line, book.path, cluster.start_timeout, job, **asked)
    words = [f"hydra.sweep.dir={quoted(str(book.path))}"]
    if facts.launcher == "basic" and (cluster.name == "slurm" or cluster.parallel > 1):
        words.append(f"hydra/launcher={LAUNCHERS[cluster.name]}")
        words += [f"hydra.launcher.jobs={cluster.parallel}"] * (cluster.name == "local")
    try:
        hydra_app.run_hydra(line, element, ["--multirun"], words)
    except KeyboardInterrupt:
        return element.interrupted or INTERRUPTED[0]
    if cluster.name == "slurm" and not (cluster.wait or sampled):
        print(f"sweep       {book.path}\ntable       prl sweep {book.path}", flush=True)
        return 0
    return tell(book)


def dry_run(line: CommandLine, configs: list[Any], elements: list[list[str]]) -> int:
    """The array that a sweep over SLURM would submit, with what its elements are. Raises ConfigErrors."""
    facts, cluster = hydra_facts(line), one_cluster(configs)
    request = array_request(line, cluster, facts.launcher, facts.directory.resolve(), cluster.wait)
    count = facts.batch or len(elements)
    print(describe_array(request, line.command, configs, elements, count))
    return 0


def hydra_facts(line: CommandLine) -> HydraFacts:
    """Directory, launcher and sweeper as Hydra's own options say."""
    from hydra.types import RunMode

    from prl.config.compose import open_options

    with open_options(line.command, line.overrides, line.config_dirs, line.config_name) as options:
        settled, _ = options.settle(sweeps=True)
        config = options.reader.loader.load_configuration(
            options.config_name, settled.first_choices, RunMode.MULTIRUN
        )
    choices = config.hydra.runtime.choices
    launcher, sweeper = choices["hydra/launcher"], choices["hydra/sweeper"]
    batch = None if sweeper == "basic" else int(config.hydra.sweeper.get("n_jobs") or 1)
    return HydraFacts(Path(config.hydra.sweep.dir), str(launcher), batch)


def words_of(line: CommandLine) -> list[str]:
    """What was typed, by which a sweep is found again."""
    return [*line.config_dirs, *([line.config_name] if line.config_name else []), *line.overrides]


def began_earlier(line: CommandLine, facts: HydraFacts) -> Path | None:
    """Directory of the sweep that this very command began; None when it names one, or began none."""
    if any(word.startswith("hydra.sweep.dir=") for word in line.overrides):
        return None
    found = find(facts.directory.parent, line.command, words_of(line))
    return found.path if found else None


def open_book(line: CommandLine, directory: Path, elements: list[list[str]] | None) -> Book:
    """The book of the sweep in `directory`, begun or gone on with. Raises ConfigErrors."""
    book = Book(directory)
    if book.exists:
        print(f"goes on with {book.path}; hydra.sweep.dir=<directory> would begin another", flush=True)
    try:
        book.open(line.command, words_of(line), elements)
    except ValueError as error:
        raise ConfigErrors([Problem("hydra.sweep.dir", NO_VALUE, str(error))]) from None
    except OSError as error:
        reason = f"cannot be written to ({error.strerror or type(error).__name__})"
        raise ConfigErrors([Problem("hydra.sweep.dir", directory, reason, "Choose another.")]) from None
    return book


def still_at_work(book: Book) -> list[str]:
    """Jobs of the sweep that wait or run now."""
    jobs = [job for number, (job, _) in book.jobs().items() if book.of(number) is None]
    arrays = sorted({job.split("_")[0] for job in jobs})
    states = {job: state for array in arrays for job, state in (active(array) or {}).items()}
    return [job for job in jobs if job in states]


def refuse_double_axes(elements: list[list[str]]) -> None:
    """An axis of `sweep=<name>` that the command line names again would multiply with itself."""
    for element in elements[:1]:
        keys = [word.lstrip("+~").partition("=")[0] for word in element]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            reason = "swept twice, by the chosen option and by the command line"
            raise ConfigErrors([Problem(key, NO_VALUE, reason, "Leave one of them out.") for key in twice])
