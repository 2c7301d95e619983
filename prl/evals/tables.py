"""Results as text: a table for the terminal, one in Markdown, one line an environment, a curve over steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prl.evals.results import AgentScore, Results, Score
from prl.evals.statistics import Estimate

BAR = " ▁▂▃▄▅▆▇█"


def estimate_text(estimate: Estimate) -> str:
    """`0.412 [0.380, 0.447]`; without the interval where there is none."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.3f}"
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def table_rows(results: Results) -> list[list[str]]:
    """Headings, then one row an agent of each environment of each checkpoint."""
    stepped = any(score.step for score in results.scores)
    ks = sorted({k for score in results.scores for agent in score.agents.values() for k in agent.pass_at})
    heads = ["step"] * stepped + ["env", "agent", "tasks", "rollouts", "errors", "avg@k"]
    heads += [f"pass@{k}" for k in ks] + [f"pass^{k}" for k in ks[1:]] + ["truncated"]
    rows = [heads]
    for score in results.scores:
        for agent, found in score.agents.items() or [("—", None)]:
            rows.append([str(score.step)] * stepped + _cells(score, agent, found, ks))
    return rows


def _cells(score: Score, agent: str, found: AgentScore | None, ks: list[int]) -> list[str]:
    done = str(score.finished) if not score.missing else f"{score.finished} of {score.expected}"
    head = [score.env, agent, str(score.tasks), done, str(score.failed)]
    if found is None:
        return [*head, "not measured", *["—"] * (2 * len(ks) - bool(ks)), "—"]
    rates = [found.pass_at.get(k) for k in ks] + [found.pass_hat.get(k) for k in ks[1:]]
    texts = [estimate_text(rate) if rate else "—" for rate in rates]
    avg = f"{estimate_text(found.avg)} (k={score.group_size})"
    return [*head, avg, *texts, f"{found.truncated:.0%}"]


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: text to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {index for index, head in enumerate(rows[0]) if head in ("env", "agent", "task", "run")}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table."""
    lines = [" | ".join(row) for row in rows]
    return "\n".join(f"| {line} |" for line in [lines[0], " | ".join("---" for _ in rows[0]), *lines[1:]])


def notes(results: Results) -> Iterator[str]:
    """What a reader must know before he quotes a number."""
    for score in results.scores:
        where = f"{score.env}" + (f" at step {score.step}" if score.step else "")
        if score.failed:
            kinds = ", ".join(f"{count} {name}" for name, count in sorted(score.errors.items()))
            rule = "counted as 0" if results.errors_rule == "zero" else "left out of every mean"
            yield f"{where}: {score.failed} of {score.finished} rollouts failed ({kinds}), {rule}"
        if score.missing:
            yield f"{where}: {score.missing} of {score.expected} rollouts are missing"


def curve(results: Results) -> list[str]:
    """avg over checkpoints, a line an agent of each environment; nothing for fewer than two checkpoints."""
    lines = []
    for env in dict.fromkeys(score.env for score in results.scores):
        scores = [score for score in results.scores if score.env == env]
        for agent in dict.fromkeys(agent for score in scores for agent in score.agents):
            points = [(s.step, s.agents[agent].avg.mean) for s in scores if agent in s.agents]
            if len(points) > 1:
                shape = "".join(
                    _bar(value, [mean for _, mean in points]) for _, mean in points for value in [mean]
                )
                text = " ".join(f"{step}:{mean:.3f}" for step, mean in points)
                lines.append(f"{env}/{agent}  {shape}  {text}")
    return lines


def _bar(value: float, values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    share = (value - low) / (high - low) if high > low else 0.5
    return BAR[1 + round(share * (len(BAR) - 2))]


def report(results: Results) -> str:
    """`results.md`."""
    parts = [f"# {results.run}: {results.model}", markdown_table(table_rows(results))]
    if found := list(notes(results)):
        parts.append("\n".join(f"- {note}" for note in found))
    if lines := curve(results):
        parts += ["Over the checkpoints:", "\n".join(f"    {line}" for line in lines)]
    interval = (
        "Brackets: 95 % bootstrap interval over tasks. pass@k and pass^k only where rewards are 0 or 1."
    )
    return "\n\n".join([*parts, interval]) + "\n"


def closing_lines(score: Score) -> Iterator[str]:
    """`Evaluated reverse_text: agent avg@4 0.412 [0.380, 0.447], 128 rollouts, 0 errors`."""
    where = score.env + (f" at step {score.step}" if score.step else "")
    tail = f"{score.finished} rollouts, {score.failed} errors"
    if not score.agents:
        yield f"Evaluated {where}: nothing was measured, {tail}"
    for agent, found in score.agents.items():
        yield f"Evaluated {where}: {agent} avg@{score.group_size} {estimate_text(found.avg)}, {tail}"
