"""`report.md` of a sweep: every element, choices with their mean over seeds, and two plots."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.sweeps.book import Book, Record
from launchers.sweeps.objective import curve_of, objective_of
from launchers.sweeps.plots import curves_figure, parallel_figure
from launchers.sweeps.statistics import Mean, mean_of
from prl.run_dir import write_atomic

SEEDS = ("seed",)
"""Keys that repeat a choice; every other swept key is part of it."""
REPORT, CURVES, PARALLEL = "report.md", "curves.svg", "parallel.svg"


@dataclass(frozen=True)
class Choice:
    """All elements of one choice: its values by swept key, their objectives, the mean of these."""

    values: dict[str, str]
    numbers: list[int]
    mean: Mean | None

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items()) or "all"


def write_report(book: Book) -> Path:
    """Write the report and its plots from what has ended so far; its path."""
    elements, records = book.elements(), book.records()
    axes = swept(elements)
    choices = choices_of(elements, records, axes)
    name = objective_name(book, records)
    curves = {choice.label: mean_curve(book, choice.numbers, records) for choice in choices}
    shown = {label: curve for label, curve in curves.items() if curve}
    if shown:
        write_atomic(book.path / CURVES, curves_figure(shown, _curve_name(book, records)))
    ranked = [choice for choice in choices if choice.mean is not None]
    compared = bool(ranked and ranked[0].values)
    if compared:
        rows = [(choice.values, choice.mean.value) for choice in ranked if choice.mean]
        write_atomic(book.path / PARALLEL, parallel_figure(rows, name))
    path = book.path / REPORT
    write_atomic(path, _text(book, elements, records, choices, name, bool(shown), compared))
    return path


def swept(elements: Mapping[int, Sequence[str]]) -> list[str]:
    """Keys whose values differ between elements, in the order of the command line."""
    tables = [_values(words) for words in elements.values()]
    keys = list(dict.fromkeys(key for values in tables for key in values))
    return [key for key in keys if len({values.get(key) for values in tables}) > 1]


def choices_of(
    elements: Mapping[int, Sequence[str]], records: Mapping[int, Record], axes: Sequence[str]
) -> list[Choice]:
    """Elements that differ in their seed only, together; the best first, those without a value last."""
    keys = [key for key in axes if key not in SEEDS]
    grouped: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, words in sorted(elements.items()):
        values = _values(words)
        grouped.setdefault(tuple((key, values.get(key, "")) for key in keys), []).append(number)
    choices = []
    for values, numbers in grouped.items():
        reached = [records[n].objective for n in numbers if n in records and records[n].finished]
        measured = [value for value in reached if value is not None]
        choices.append(Choice(dict(values), numbers, mean_of(measured) if measured else None))
    return sorted(choices, key=lambda choice: -choice.mean.value if choice.mean else float("inf"))


def mean_curve(book: Book, numbers: Sequence[int], records: Mapping[int, Record]) -> dict[int, Mean]:
    """Mean over elements at each step that all of them have; empty where nothing was trained."""
    curves = [curve_of(book.run(number))[1] for number in numbers if number in records]
    curves = [curve for curve in curves if curve]
    if not curves:
        return {}
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: mean_of([curve[step] for curve in curves]) for step in common}


def objective_name(book: Book, records: Mapping[int, Record]) -> str:
    """What the objective is, as far as any element has one."""
    found = (objective_of(book.run(number)) for number in records)
    return next((objective[0] for objective in found if objective), "objective")


def _curve_name(book: Book, records: Mapping[int, Record]) -> str:
    found = (curve_of(book.run(number)) for number in records)
    return next((name for name, curve in found if curve), "reward")


def _values(words: Sequence[str]) -> dict[str, str]:
    pairs = (word.lstrip("+~").partition("=") for word in words)
    return {key: value for key, _, value in pairs}


def _text(
    book: Book,
    elements: Mapping[int, Sequence[str]],
    records: Mapping[int, Record],
    choices: Sequence[Choice],
    name: str,
    curves: bool,
    parallel: bool,
) -> str:
    done = sum(record.finished for record in records.values())
    command = shlex.join(["prl", book.command, "--multirun", *book.words])
    lines = [f"# Sweep {book.path.name}", "", f"    {command}", ""]
    lines += [f"{len(elements)} runs: {done} finished, {len(records) - done} failed, "]
    lines[-1] += f"{len(elements) - len(records)} not ended."
    lines += ["", f"## Choices by {name}", "", *_choice_table(choices, name)]
    lines += ["", f"![learning curves]({CURVES})"] * curves
    lines += ["", f"![parallel coordinates]({PARALLEL})"] * parallel
    lines += ["", "## Runs", "", *_run_table(book, elements, records, name)]
    return "\n".join(lines) + "\n"


def _choice_table(choices: Sequence[Choice], name: str) -> list[str]:
    keys = list(choices[0].values) if choices else []
    head = [*keys, f"{name} (mean ± 95 %)", "runs"]
    rows = [[*c.values.values(), str(c.mean) if c.mean else "-", _ended(c)] for c in choices]
    return markdown(head, rows)


def _ended(choice: Choice) -> str:
    measured = choice.mean.count if choice.mean else 0
    total = len(choice.numbers)
    return str(total) if measured == total else f"{measured} of {total}"


def _run_table(
    book: Book, elements: Mapping[int, Sequence[str]], records: Mapping[int, Record], name: str
) -> list[str]:
    axes, rows = swept(elements), []
    for number, words in sorted(elements.items()):
        record, values = records.get(number), _values(words)
        state = record.outcome if record else "not ended"
        value = f"{record.objective:.4f}" if record and record.objective is not None else "-"
        cells = [f"[{number}]({number})", *(values.get(key, "") for key in axes), state, value]
        rows.append([*cells, (record.job if record else None) or "-"])
    return markdown(["run", *axes, "state", name, "job"], rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    body = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in body]
