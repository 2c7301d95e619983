"""The stream is the ledger: torn lines are nobody's, successes are kept, failures give way."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from evals_lab import fill, make_episode, make_run

from prl.evals.ledger import FAULT_WIDTH, Ledger, last_fault, read_rows, read_stream, records_at
from prl.evals.plan import Plan
from prl.evals.sources import Key
from prl.records import TraceError

A, B, C = Key(0, "toy", "a", 0), Key(0, "toy", "a", 1), Key(0, "toy", "b", 0)


def test_rows_say_what_happened(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, 0.5), (B, None), (C, {"left": 1.0, "right": -1.0})])
    rows = read_rows(run)
    assert [rows[key].ok for key in (A, B, C)] == [True, False, True]
    assert rows[A].agents[0].reward == 0.5 and rows[A].agents[0].metrics == {"exact": 0.5}
    assert rows[B].errors == ("ProviderError",) and rows[B].agents == ()
    assert {result.agent: result.reward for result in rows[C].agents} == {"left": 1.0, "right": -1.0}
    assert [rows[key].line for key in (A, B, C)] == [0, 1, 2]


def test_index_points_into_the_stream(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, 0.5), (B, 0.25)])
    data = (run.traces / "stream.jsonl").read_bytes()
    for line in (run.traces / "index.jsonl").read_text().splitlines():
        entry = json.loads(line)
        record = json.loads(data[entry["offset"] : entry["offset"] + entry["length"]])
        assert (record["id"], record["rollout"]) == (entry["id"], entry["rollout"])
        assert entry["kind"] == "eval"


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_last_line_is_dropped_and_its_rollout_done_again(tmp_path: Path, cut: int) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, 0.5), (B, 0.25)])
    stream = run.traces / "stream.jsonl"
    stream.write_bytes(stream.read_bytes()[:-cut])
    assert set(read_rows(run)) == ({A, B} if cut == 1 else {A}), "only the newline is no loss"
    ledger = Ledger(make_run(tmp_path, 2))
    assert ledger.settled == set(read_rows(run))
    if cut > 1:
        asyncio.run(ledger.append(B, make_episode(B, 0.75), 0))
        rows = read_rows(run)
        assert set(rows) == {A, B} and rows[B].agents[0].reward == 0.75


def test_a_success_replaces_a_failure_and_nothing_replaces_a_success(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, None), (A, None)])
    failed = read_rows(run)[A]
    assert not failed.ok and failed.line == 1
    ledger = Ledger(run)
    first, second = make_episode(A, 1.0), make_episode(A, 0.0)
    asyncio.run(ledger.append(A, first, 0))
    with pytest.raises(ValueError, match="was finished before"):
        asyncio.run(ledger.append(A, second, 0))
    lines = (run.traces / "stream.jsonl").read_text().splitlines()
    with (run.traces / "stream.jsonl").open("a") as stream:
        stream.write(json.dumps({**json.loads(lines[-1]), "id": "twin"}) + "\n")
    assert read_rows(run)[A].id == first.id, "even a stream with two successes counts one"


def test_failures_in_one_attempt_may_follow_each_other(tmp_path: Path) -> None:
    ledger = Ledger(make_run(tmp_path))
    fault = TraceError("ProviderError", "x", 500)
    for _ in range(2):
        asyncio.run(ledger.append(A, make_episode(A, 0.0, fault), 4))
    assert ledger.settled == set()


def test_the_last_fault_is_told_in_a_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert last_fault(run) == ""
    fill(run, [(A, 1.0)])
    assert last_fault(run) == ""
    ledger = Ledger(run)
    for message in ("first", "no\nway " + "x" * 1000):
        fault = TraceError("HarnessError", message)
        asyncio.run(ledger.append(B, make_episode(B, 0.0, fault), 0))
    told = last_fault(run)
    assert told.startswith("HarnessError: no way xxx") and len(told) == FAULT_WIDTH


def test_lines_of_others_are_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, 0.5)])
    with (run.traces / "stream.jsonl").open("a") as stream:
        stream.write('[]\n{"note": 1}\nnot json\n\n')
    assert [number for number, _ in read_stream(run.traces / "stream.jsonl")] == [0]
    assert read_rows(make_run(tmp_path / "nothing")) == {}


def test_records_are_found_by_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, 0.5), (B, 0.25), (C, 1.0)])
    found = records_at(run.traces / "stream.jsonl", [2, 0])
    assert [(record["task_key"], record["rollout"]) for record in found] == [("a", 0), ("b", 0)]


def test_plans_come_back_as_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert Plan.read(run) is None
    plan = Plan({"x": 2, "y": 1}, {"x": ["a", "b"], "y": ["c"]}, [10, 20])
    plan.write(run)
    assert Plan.read(run) == plan
    expected = plan.keys()
    assert len(expected) == 10 and Key(20, "y", "c", 0) in expected
    assert list(plan.parts()) == [(10, "x"), (10, "y"), (20, "x"), (20, "y")]
