"""`prl eval` from a checked config to an exit code: plan, place, supervise, count, tell."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.dry_run import configuration, placement_report
from launchers.interrupts import Interrupts
from launchers.local import Outcome, tail
from launchers.run import REFUSED, launcher_log, note_end
from launchers.run_directory import RunPlan, append_status, open_run, plan_by_name
from launchers.site import Site, current_site
from launchers.summary import full_disk
from launchers.sweep import sweep_directory, task_overrides
from prl.dashboard.daemon import offer
from prl.evals.checkpoints import settle_checkpoints
from prl.evals.describe import describe_evaluation
from prl.evals.display import EvalDisplay
from prl.evals.identity import check_same, note_weights
from prl.evals.ledger import last_fault
from prl.evals.mlflow_report import publish
from prl.evals.plot import write_plot
from prl.evals.results import Results, collect, metrics, write_results
from prl.evals.sources import merge_envs
from prl.evals.tables import closing_lines, curve, notes, plain_table, report, table_rows
from prl.monitor.companions import companions
from prl.run_dir import RunDir, write_atomic
from prl.tracking.mlflow_run import Facts
from prl.tracking.mlflow_store import Store, find_store
from prl.tracking.mlflow_writer import MlflowWriter
from prl.tracking.stream import MetricStream
from prl.tracking.terminal import announce

TRACK_SECONDS = {"FINISHED": 180.0, "FAILED": 30.0, "KILLED": 8.0}
"""How long the tracker may take, by how the evaluation ended. It is first met here, after the results are
printed: importing it and making its database take most of that on a busy machine."""
PUBLISH_SECONDS = 120.0


def launch_eval(config: Any, command_line: str | list[str]) -> int:
    """Run `prl eval` to its end; the exit code: 0 done, 1 failed, 2 refused, 128 + signal if stopped."""
    words = shlex.split(command_line) if isinstance(command_line, str) else command_line
    site = current_site()
    try:
        plan = plan_evaluation(config, lambda settled: site.plan(settled, plan_by_name))
        roles = site.roles("eval", config, RunDir(plan.path))
    except ValueError as error:
        return _refuse(error)
    origin = f"goes on with {plan.path}" if plan.continues else plan.origin()
    if config.dry_run:
        print(configuration("eval", config))
    told = f"{describe_evaluation(config, plan.path)}\n{origin}"
    if config.dry_run:
        print(told, placement_report(config, roles), sep="\n")
        return 0
    announce(config.log, told)
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(site.interrupts())
        try:
            run = stack.enter_context(open_run("eval", config, plan, words))
        except (ValueError, OSError) as error:  # taken meanwhile, or not writable
            return _refuse(error)
        stack.enter_context(launcher_log(run, config.log))
        stack.enter_context(companions(config, run))
        return Evaluation(config, plan, run, words, interrupts, site).execute()


def plan_evaluation(config: Any, planner: Callable[[Any], RunPlan]) -> RunPlan:
    """Where an evaluation lives and what it goes on with; `config` gets its environments and checkpoints
    settled. Writes nothing. Raises ValueError for what it cannot measure, or not go on with.
    """
    merge_envs(config)
    settle_checkpoints(config)
    plan = planner(config)
    if plan.continues:
        check_same(config, plan.path)
    return plan


@dataclass
class Evaluation:
    """One attempt at an evaluation whose directory is open."""

    config: Any
    plan: RunPlan
    run: RunDir
    command_line: list[str]
    interrupts: Interrupts
    site: Site

    def execute(self) -> int:
        """Run the roles with everything around them; the exit code."""
        append_status(self.run, "started", ["evaluation"])
        note_weights(self.config, self.run)
        roles = self.site.roles("eval", self.config, self.run)
        display = EvalDisplay(self.config.log.display, self.run, form=self.config.log.format)
        display.start()
        display.note(f"starting {', '.join(role.name for role in roles)}; logs in {self.run.logs}")
        offer(self.config.monitor.dashboard, self.run.path.parent, display.note)
        outcome = Outcome(1, "FAILED", "the launcher itself failed")
        try:
            outcome = self.site.supervise(roles, self.run, self.config, self.interrupts)
        finally:
            display.close()
        return self._tell(outcome)

    def _tell(self, outcome: Outcome) -> int:
        """Count what is in the ledger, however the attempt ended, and tell everybody."""
        results = collect(self.config, self.run)
        outcome = self._kept(self._judged(outcome, results), results)
        announce(self.config.log, _summary(outcome, results, self.run, self._store(), self.command_line))
        if outcome.status == "FAILED":
            announce(self.config.log, _failure(outcome, self.run), sys.stderr)
        self._track(outcome, results)
        note_end(self.config, self.run, outcome, list(notes(results)) if results else [])
        return self.site.close(outcome) or outcome.code

    def _judged(self, outcome: Outcome, results: Results | None) -> Outcome:
        """An evaluation that measured nothing has failed, although every process did its part."""
        if outcome.status != "FINISHED" or (results and any(score.agents for score in results.scores)):
            return outcome
        reason, fault = "no rollout ended well, so nothing was measured", last_fault(self.run)
        return Outcome(1, "FAILED", f"{reason}; the last one: {fault}" if fault else reason)

    def _kept(self, outcome: Outcome, results: Results | None) -> Outcome:
        """Write the results down. Where that fails, on a full disk, they are still shown and tracked."""
        if results is None:
            return outcome
        try:
            write_results(results, self.run)
            write_atomic(self.run.path / "results.md", report(results))
            write_plot(results, self.run.path / "rewards.svg")
            if outcome.status != "KILLED":
                self._log(results)
        except OSError as error:
            reason = f"the results could not be written: {error}"
            whole = "; ".join(filter(None, [outcome.reason, reason]))
            return Outcome(outcome.code or 1, "FAILED", whole, outcome.culprits)
        return outcome

    def _log(self, results: Results) -> None:
        stream = MetricStream(self.run.metric_file("eval"), "eval")
        for score in results.scores:
            stream.log(metrics(score), score.step)
        stream.close()

    def _track(self, outcome: Outcome, results: Results | None) -> None:
        store = self._store()
        if store is None or results is None:
            return
        overrides = task_overrides(self.command_line)
        facts = Facts(self.run, "eval", self.config, overrides, sweep_directory())
        writer = MlflowWriter(facts, store, print)
        writer.start()
        arrived = writer.close(outcome.status, TRACK_SECONDS[outcome.status], self.interrupts.since_now())
        if arrived:
            publish(self.run, store, results, PUBLISH_SECONDS, print)

    def _store(self) -> Store | None:
        tracking = self.config.tracking
        return find_store(tracking.uri, self.plan.path.parent) if tracking.name == "mlflow" else None


def _summary(
    outcome: Outcome, results: Results | None, run: RunDir, store: Store | None, words: Sequence[str]
) -> str:
    """The table, what to know about it, and where everything is."""
    lines = [f"{outcome.status.lower()}: {outcome.reason}" if outcome.reason else outcome.status.lower()]
    if results:
        lines += ["", plain_table(table_rows(results)), "", *curve(results)]
        lines += [line for score in results.scores for line in closing_lines(score)]
        lines += [*notes(results), ""]
    places = {"run": run.path, "results": run.path / "results.md", "traces": run.traces, "logs": run.logs}
    lines += [f"{name:9}{place}" for name, place in places.items() if Path(place).exists()]
    if results and store:
        lines.append(f"{'MLflow':9}{store.ui_command}")
    if outcome.status != "FINISHED":
        lines.append(f"finished rollouts are kept; go on by: {again(words, run.path.name)}")
    return "\n".join(lines)


def again(words: Sequence[str], name: str) -> str:
    """The command line that goes on with the evaluation `name`, which `words` began or went on with."""
    dropped = ("run.name=", "run.resume=", "run.clean=")
    kept = [word for word in words if not word.startswith(dropped) and word != "--resume"]
    return shlex.join([*kept, f"run.name={name}", "--resume"])


def _failure(outcome: Outcome, run: RunDir) -> str:
    """One line where the cause is the user's to mend; else the last line of each log at fault."""
    told = run.configs / "failure.txt"
    deadline = time.monotonic() + 0.5
    while not told.exists() and "eval" in outcome.culprits and time.monotonic() < deadline:
        time.sleep(0.05)
    if told.exists():
        return f"the evaluation failed: {told.read_text().strip()}"
    lines = [f"the evaluation failed: {outcome.reason}"]
    for name in outcome.culprits:
        last = tail(run.log_file(name), 1).strip()
        lines.append(f"{name}: {last} ({run.log_file(name)})")
    return "\n".join([*lines, *full_disk(run)])


def _refuse(error: Exception) -> int:
    print(error, file=sys.stderr)
    return REFUSED
