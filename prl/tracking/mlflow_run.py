"""The one MLflow run of a prl run, over all its processes and resumes. Imports mlflow when it connects."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from prl.run_dir import RunDir, write_atomic
from prl.tracking.board import Board
from prl.tracking.facts import Facts, tags_of
from prl.tracking.mlflow_inputs import log_inputs
from prl.tracking.mlflow_models import exports, register, weights_of
from prl.tracking.mlflow_store import Store, create_database, locked, quieten_mlflow
from prl.tracking.mlflow_sweep import join_sweep, settle_sweep
from prl.tracking.mlflow_traces import send_traces, table_of
from prl.tracking.names import MetricNames, safe_name
from prl.tracking.params import flatten
from prl.tracking.plots import write_plots
from prl.tracking.provenance import attempt_files, code_directory
from prl.tracking.reader import MetricTails, Record
from prl.tracking.secrets import redact

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

METRICS_PER_CALL = 1000
PARAMS_PER_CALL = 100
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")
"""Error codes that no retry cures: the data is at fault, not the tracker."""


class TrackedRun:
    """Metrics, params, tags, artifacts and status of one run. Any call may raise what the tracker raises."""

    def __init__(self, facts: Facts, store: Store, names: MetricNames, say: Callable[[str], None]) -> None:
        self._facts = facts
        self._store = store
        self._say = say
        self._client: MlflowClient | None = None
        self._newest_step = 0
        self._sample: dict[str, list[Any]] = {}
        self.run_id = ""
        self.parent_id: str | None = None
        self.names = names
        self.refused: set[str] = set()

    def connect(self) -> None:
        """Open the run that the run directory names, or make one."""
        quieten_mlflow()
        from mlflow.tracking import MlflowClient

        with locked(self._store):
            create_database(self._store)
            client = MlflowClient(self._store.uri)
            experiment = self._experiment(client)
            if not self._reopen(client):
                self._create(client, experiment)
            self._describe(client)
        self._client = client

    @property
    def connected(self) -> bool:
        return self._client is not None

    def log(self, records: Iterable[Record]) -> None:
        """Send records; a metric that the tracker refuses is left out and remembered in `refused`."""
        metrics = [metric for record in records for metric in self._metrics(record)]
        with locked(self._store):
            for start in range(0, len(metrics), METRICS_PER_CALL):
                self._send(metrics[start : start + METRICS_PER_CALL])

    def log_traces(self, records: list[dict[str, Any]]) -> None:
        """Send episodes (lines of `traces/stream.jsonl`) as traces of the run."""
        assert self._client is not None
        with locked(self._store):
            send_traces(self._client, self._store.uri, self.run_id, records)
        for name, column in table_of(records).items():
            self._sample.setdefault(name, []).extend(column)

    def finish(self, status: str) -> None:
        """Record how the run ended: FINISHED, FAILED or KILLED; and what that means for its sweep."""
        assert self._client is not None
        with locked(self._store):
            self._client.set_terminated(self.run_id, status)
            if self.parent_id:
                settle_sweep(self._client, self.parent_id)

    def add_results(self) -> None:
        """Plots of the curves, the table of sampled traces, and where exported weights are."""
        assert self._client is not None
        run, client = self._facts.run, self._client
        board, tails = Board(), MetricTails(run.metrics)
        while records := tails.read():  # piece by piece: the streams of a long run are large
            board.update(records)
        plots = write_plots(board, run.path / "plots")
        with locked(self._store):
            for path in plots:
                client.log_artifact(self.run_id, str(path), "plots")
            if self._sample:
                self._add_table(client)
            for tag, place in exports(run).items():
                client.set_tag(self.run_id, tag, str(place))

    def register_model(self, name: str) -> int:
        """The weights of the finished run as a version of the registered model `name`; its number."""
        assert self._client is not None
        weights = weights_of(self._facts.run)
        with locked(self._store):
            return register(self._client, name, weights, self.run_id)

    def _add_table(self, client: MlflowClient) -> None:
        """MLflow's own call would append to the rows of a call that failed half-way."""
        file = f"traces/attempt_{self._facts.run.attempt}.json"
        rows = list(zip(*self._sample.values(), strict=True))
        text = json.dumps({"columns": list(self._sample), "data": rows}, ensure_ascii=False)
        client.log_text(self.run_id, text, file)
        client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps([{"path": file, "type": "table"}]))

    def _experiment(self, client: MlflowClient) -> str:
        name = self._facts.config.tracking.experiment
        found = client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        local = self._store.artifacts / safe_name(name)
        place = local.as_uri() if self._store.database else None
        return str(client.create_experiment(name, artifact_location=place))

    def _reopen(self, client: MlflowClient) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            run_id = run_id_file(self._facts.run).read_text().strip()
            known = client.get_run(run_id)
        except FileNotFoundError:
            return False
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if known.info.lifecycle_stage != "active":
            return False
        # Also repairs a run that a killed launcher left behind.
        client.update_run(run_id, status="RUNNING")
        self.run_id, self.parent_id = run_id, known.data.tags.get("mlflow.parentRunId")
        self._log_params(client, known.data.params)
        return True

    def _create(self, client: MlflowClient, experiment: str) -> None:
        facts, tags = self._facts, {}
        if facts.sweep is not None:
            self.parent_id = join_sweep(client, experiment, facts.sweep)
            tags["mlflow.parentRunId"] = self.parent_id
        made = client.create_run(experiment, tags=tags, run_name=facts.run.path.name)
        self.run_id = made.info.run_id
        write_atomic(run_id_file(facts.run), self.run_id + "\n")
        self._log_params(client, {})

    def _log_params(self, client: MlflowClient, known: dict[str, str]) -> None:
        """Params never change in MLflow: what differs on a resume becomes a tag."""
        from mlflow.entities import Param

        values = {safe_name(path): value for path, value in flatten(self._facts.config).items()}
        for path, value in values.items():
            if len(value) > PARAM_LENGTH:
                client.log_text(self.run_id, value, f"params/{path}.txt")
        cut = {path: value[:PARAM_LENGTH] for path, value in values.items()}
        fresh = [Param(path, value) for path, value in cut.items() if path not in known]
        for start in range(0, len(fresh), PARAMS_PER_CALL):
            client.log_batch(self.run_id, params=fresh[start : start + PARAMS_PER_CALL])
        drift = {path: [known[path], cut[path]] for path in cut if path in known and known[path] != cut[path]}
        if drift:
            text = json.dumps(drift, ensure_ascii=False)
            client.set_tag(
                self.run_id, f"params_changed.attempt_{self._facts.run.attempt}", text[:TAG_LENGTH]
            )

    def _describe(self, client: MlflowClient) -> None:
        """Tags of the run; config, code and packages of this attempt."""
        from mlflow.entities import RunTag

        tags = [RunTag(key, value[:TAG_LENGTH]) for key, value in tags_of(self._facts).items()]
        client.log_batch(self.run_id, tags=tags)
        tree = {"command": self._facts.command, **redact(dataclasses.asdict(self._facts.config))}
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        if self._facts.command == "sft":
            log_inputs(client, self.run_id, self._facts.config)
        files = {"resolved.yaml": text, **attempt_files(self._facts.run, code_directory())}
        for name, content in files.items():
            client.log_text(self.run_id, content, f"config/attempt_{self._facts.run.attempt}/{name}")

    def _metrics(self, record: Record) -> Iterable[Metric]:
        """Points of one record; what has no step of its own is drawn at the newest step."""
        from mlflow.entities import Metric

        if record.resumed_from is not None:
            self._note_resume(record)
        self._newest_step = max(self._newest_step, record.step or 0)
        step = self._newest_step if record.step is None else record.step
        for name, value in record.values.items():
            yield Metric(self.names.of(record.producer, name), value, int(record.time * 1000), step)

    def _note_resume(self, record: Record) -> None:
        assert self._client is not None
        before = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
        text = (
            f"resumed from step {record.resumed_from}: points of later steps logged before {before} are void"
        )
        self._client.set_tag(self.run_id, f"resumed.attempt_{record.attempt}", text)

    def _send(self, metrics: list[Metric]) -> None:
        from mlflow.exceptions import MlflowException

        assert self._client is not None
        try:
            self._client.log_batch(self.run_id, metrics=metrics)
        except MlflowException as error:
            if error.error_code not in REFUSALS:
                raise
            if len(metrics) == 1:
                self._leave_out(metrics[0], error)
                return
            middle = len(metrics) // 2
            self._send(metrics[:middle])
            self._send(metrics[middle:])

    def _leave_out(self, metric: Metric, error: Exception) -> None:
        if metric.key not in self.refused:
            self._say(f"MLflow refuses the metric {metric.key}; it is in the run directory: {error}"[:400])
        self.refused.add(metric.key)


def run_id_file(run: RunDir) -> Path:
    """Where the id of the MLflow run is kept."""
    return run.path / "mlflow_run_id"
