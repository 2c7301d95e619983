"""What the role of an environment server hands to verifiers."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1.serve as serve
from env_server_process import make_config

from prl.config import sources
from prl.config.evals import EvalEnvConfig
from prl.env import server
from prl.run_dir import RunDir


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(serve, "serve_env", lambda **options: found.update(options))
    monkeypatch.setattr(server, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=signal.SIGTERM))
    monkeypatch.setattr(server, "_WorkerWatch", lambda workers: type("Watch", (), {"dead": ""})())
    return found


def test_elastic_workers_are_passed_on(served: dict[str, Any], tmp_path: Path) -> None:
    env = sources.EnvConfig(workers=4, elastic=True, multiplex=32)
    server.main(make_config(reverse_text=env), RunDir(tmp_path), "env/reverse_text")
    assert (served["max_workers"], served["elastic"], served["multiplex"]) == (4, True, 32)


def test_workers_are_fixed_unless_asked_otherwise(served: dict[str, Any], tmp_path: Path) -> None:
    server.main(make_config(reverse_text=sources.EnvConfig(workers=2)), RunDir(tmp_path), "env/reverse_text")
    assert (served["max_workers"], served["elastic"]) == (2, False)


def test_an_evaluations_server_is_its_own_and_needs_no_renderer(
    served: dict[str, Any], tmp_path: Path
) -> None:
    config = make_config(arithmetic=sources.EnvConfig())
    config.eval.env = {"reverse_text": EvalEnvConfig()}
    server.main(config, RunDir(tmp_path), "env/eval/reverse_text")
    assert served["config_data"]["taskset"]["id"] == "reverse_text"
    assert served["config_data"]["taskset"]["seed"] == config.seed + 1
    assert served["log_setup"].args[1] is None
