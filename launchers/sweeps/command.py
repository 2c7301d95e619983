"""`--multirun`: from checked elements to a finished sweep: where it lies, who launches it, what it told."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.slurm.queue import active
from launchers.sweeps.book import Book, find
from launchers.sweeps.element import INTERRUPTED, Element, Job
from launchers.sweeps.tell import lines_of, table, tell
from prl.config.command_line import CommandLine
from prl.config.errors import NO_VALUE, ConfigErrors, Problem
from prl.config.overrides import quoted

LAUNCHERS = {"slurm": "prl_slurm", "local": "prl_local"}


@dataclass(frozen=True)
class HydraFacts:
    """What the composed options say of the sweep itself."""

    directory: Path
    launcher: str
    sweeper: str


def run_sweep(line: CommandLine, job: Job, configs: list[Any], elements: list[list[str]]) -> int:
    """Run every element that is not finished yet; the exit code: that of the first that failed, or 0.

    `configs`: of the elements that are known before any runs. `elements`: their overrides.
    Raises ConfigErrors.
    """
    from prl.config import hydra_app

    facts = hydra_facts(line)
    refuse_double_axes(elements)
    cluster = one_cluster(configs)
    sampled = facts.sweeper != "basic"
    book = open_book(line, facts, None if sampled else elements)
    if at_work := still_at_work(book):
        print(table(lines_of(book)))
        print(f"at work: {' '.join(at_work)}; nothing was submitted")
        return 0
    for record in book.records().values():
        if not record.finished:
            book.forget(record.number)
    element = Element(line, book.path, cluster.start_timeout, job, **_request(line, cluster, book, sampled))
    words = [f"hydra.sweep.dir={quoted(str(book.path))}"]
    if facts.launcher == "basic" and (cluster.name == "slurm" or cluster.parallel > 1):
        words.append(f"hydra/launcher={LAUNCHERS[cluster.name]}")
        words += [f"hydra.launcher.jobs={cluster.parallel}"] * (cluster.name == "local")
    try:
        hydra_app.run_hydra(line, element, ["--multirun"], words)
    except KeyboardInterrupt:
        return element.interrupted or INTERRUPTED[0]
    except ConfigErrors as error:  # the cluster refused
        print(error, file=sys.stderr)
        return 2
    if cluster.name == "slurm" and not (cluster.wait or sampled):
        print(f"sweep       {book.path}\ntable       prl sweep {book.path}", flush=True)
        return 0
    return tell(book)


def dry_run(line: CommandLine, configs: list[Any], elements: list[list[str]]) -> int:
    """The array that a sweep over SLURM would submit, with what its elements are."""
    from launchers.slurm.request import make_executor, parameters, script
    from launchers.slurm.submit import job_directory, nodes_in_words

    facts, cluster = hydra_facts(line), one_cluster(configs)
    for number, overrides in enumerate(elements):
        print(f"element {number:<4} {' '.join(overrides)}")
    job_directory(line.command, configs[0])
    wanted = parameters(cluster, facts.directory.name)
    folder = facts.directory.resolve() / ".submitit" / "%j"
    print(f"--- sbatch script of {len(elements)} elements, each on {nodes_in_words(cluster.nodes)}")
    print(script(make_executor(wanted, folder), len(elements)).rstrip())
    print("dry run: nothing was submitted, nothing was written")
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
    return HydraFacts(Path(config.hydra.sweep.dir), str(launcher), str(sweeper))


def open_book(line: CommandLine, facts: HydraFacts, elements: list[list[str]] | None) -> Book:
    """The book of this very command's sweep when it began earlier, else a new one. Raises ConfigErrors."""
    words = [*line.config_dirs, *([line.config_name] if line.config_name else []), *line.overrides]
    given = any(word.startswith("hydra.sweep.dir=") for word in line.overrides)
    earlier = None if given else find(facts.directory.parent, line.command, words)
    book = Book((earlier.path if earlier else facts.directory).resolve())
    if book.exists:
        print(f"goes on with {book.path}; hydra.sweep.dir=<directory> would begin another", flush=True)
    try:
        book.open(line.command, words, elements)
    except ValueError as error:
        raise ConfigErrors([Problem("hydra.sweep.dir", NO_VALUE, str(error))]) from None
    return book


def still_at_work(book: Book) -> list[str]:
    """Jobs of the sweep that wait or run now."""
    jobs = [job for number, (job, _) in book.jobs().items() if book.of(number) is None]
    arrays = sorted({job.split("_")[0] for job in jobs})
    states = {job: state for array in arrays for job, state in (active(array) or {}).items()}
    return [job for job in jobs if job in states]


def one_cluster(configs: list[Any]) -> Any:
    """The `cluster` that all elements share. Raises ConfigErrors: an array asks SLURM once for all."""
    clusters = [config.cluster for config in configs]
    if clusters[0].name == "slurm" and any(cluster != clusters[0] for cluster in clusters):
        reason = "the elements of one array have the same resources"
        raise ConfigErrors(
            [Problem("cluster", NO_VALUE, reason, "Sweep over cluster.* in separate commands.")]
        )
    return clusters[0]


def refuse_double_axes(elements: list[list[str]]) -> None:
    """An axis of `sweep=<name>` that the command line names again would multiply with itself."""
    for element in elements[:1]:
        keys = [word.lstrip("+~").partition("=")[0] for word in element]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            reason = "swept twice, by the chosen option and by the command line"
            raise ConfigErrors([Problem(key, NO_VALUE, reason, "Leave one of them out.") for key in twice])


def _request(line: CommandLine, cluster: Any, book: Book, sampled: bool) -> dict[str, Any]:
    if cluster.name != "slurm":
        return {}
    from launchers.slurm.request import parameters

    typed = [word.lstrip("+") for word in line.overrides if word.lstrip("+").startswith("hydra.launcher.")]
    keys = frozenset(word.split("=")[0].split(".")[2] for word in typed)
    wait = {"wait": cluster.wait or sampled, "poll_seconds": cluster.poll_seconds}
    return {"request": {**parameters(cluster, book.path.name), **wait}, "typed": keys}
