"""Where the policy and the teachers are, and how an environment samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prl.config.algo import EndpointConfig, GrpoConfig, OpdConfig, SftAlgoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig
from prl.config.serving import EmbeddedConfig, ExternalConfig, TrackingConfig
from prl.config.sources import EnvConfig, SamplingConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig
from prl.orchestrator.endpoints import Endpoint, algo_of, policy_endpoint, sampling_of, teacher_endpoint
from prl.run_dir import RunDir


def config(**changes: Any) -> RlConfig:
    values = {
        "algo": GrpoConfig(), "loss": IpoConfig(), "model": ModelConfig(name="tiny"), "optim": AdamWConfig(),
        "env": {"a": EnvConfig(), "b": EnvConfig()}, "scheduler": SchedulerConfig(),
        "inference": EmbeddedConfig(ready_timeout=0.2), "tracking": TrackingConfig(),
    }  # fmt: skip
    return RlConfig(**{**values, **changes})


def run_dir(tmp_path: Path, **addresses: str) -> RunDir:
    run = RunDir(tmp_path)
    for role, address in addresses.items():
        run.publish_address(role.replace("__", "/"), address)
    return run


def teacher(cfg: RlConfig, env: str, run: RunDir) -> Endpoint | None:
    return asyncio.run(teacher_endpoint(cfg, env, run))


def test_the_policy_is_served_by_the_run(tmp_path: Path) -> None:
    run = run_dir(tmp_path, inference="http://127.0.0.1:8000")
    found = asyncio.run(policy_endpoint(config(), run))
    assert found == Endpoint("http://127.0.0.1:8000", "tiny") and found.v1 == "http://127.0.0.1:8000/v1"


def test_the_policy_may_be_served_elsewhere(tmp_path: Path) -> None:
    external = ExternalConfig(base_url="http://far/v1/", api_key_var="MY_KEY")
    found = asyncio.run(policy_endpoint(config(inference=external), run_dir(tmp_path)))
    assert found == Endpoint("http://far", "tiny", "MY_KEY")


def test_an_engine_that_does_not_come_up_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="inference"):
        asyncio.run(policy_endpoint(config(), run_dir(tmp_path)))


def test_grpo_has_no_teacher(tmp_path: Path) -> None:
    assert teacher(config(), "a", run_dir(tmp_path)) is None


@pytest.mark.parametrize("kind", [OpdConfig, SftAlgoConfig])
def test_the_runs_teacher_is_shared(tmp_path: Path, kind: type) -> None:
    cfg = config(algo=kind(teacher=EndpointConfig(model="big", timeout=9.0)))
    run = run_dir(tmp_path, teacher__shared="http://127.0.0.1:1")
    assert teacher(cfg, "a", run) == Endpoint("http://127.0.0.1:1", "big", "PRL_API_KEY", {}, 9.0)


def test_an_environments_own_teacher_is_its_own(tmp_path: Path) -> None:
    own = OpdConfig(teacher=EndpointConfig(model="big"))
    cfg = config(env={"a": EnvConfig(algo=own), "b": EnvConfig()})
    run = run_dir(tmp_path, teacher__a="http://127.0.0.1:2")
    assert teacher(cfg, "a", run).root == "http://127.0.0.1:2"
    assert teacher(cfg, "b", run) is None
    assert algo_of(cfg, "a") is own and algo_of(cfg, "b") is cfg.algo


def test_a_teacher_elsewhere_needs_no_role(tmp_path: Path) -> None:
    there = EndpointConfig(model="big", base_url="http://far:1/v1", api_key_var="K", headers={"x": "y"})
    found = teacher(config(algo=OpdConfig(teacher=there)), "a", run_dir(tmp_path))
    assert found == Endpoint("http://far:1", "big", "K", {"x": "y"}, 600.0)


def test_a_teacher_that_does_not_come_up_is_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="teacher/shared"):
        teacher(config(algo=OpdConfig()), "a", run_dir(tmp_path))


def test_an_environments_sampling_overrides_field_by_field() -> None:
    cfg = config(env={"a": EnvConfig(sampling=SamplingConfig(temperature=0.5)), "b": EnvConfig()})
    cfg.rollout.sampling.max_tokens = 13
    assert sampling_of(cfg, "a") == {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_tokens": 13}
    cfg.rollout.sampling.max_tokens = None
    assert sampling_of(cfg, "b") == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def test_further_keys_of_a_request_are_merged_one_by_one() -> None:
    own = SamplingConfig(extra_body={"min_tokens": 2}, reasoning_effort="low")
    cfg = config(env={"a": EnvConfig(sampling=own)})
    cfg.rollout.sampling.extra_body = {"min_tokens": 1, "ignore_eos": True}
    found = sampling_of(cfg, "a")
    assert (found["min_tokens"], found["ignore_eos"], found["reasoning_effort"]) == (2, True, "low")
    assert "extra_body" not in found
