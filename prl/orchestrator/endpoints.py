"""Where the models are that this run samples from or asks for logprobs: the policy, and frozen teachers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from prl.config.schema import RlConfig
from prl.run_dir import RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Endpoint:
    """A served model. `root` is its URL without `/v1`; `api_key_var` names an environment variable."""

    root: str
    model: str
    api_key_var: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 600.0

    @property
    def v1(self) -> str:
        return f"{self.root}/v1"


async def policy_endpoint(config: RlConfig, run: RunDir) -> Endpoint:
    """The engine that serves the live policy: one started elsewhere, or role `inference` of this run."""
    inference = config.inference
    key = getattr(inference, "api_key_var", None)
    if url := getattr(inference, "base_url", None):
        return Endpoint(_root(url), config.model.name, key, dict(inference.headers))
    address = await run.wait_for_address("inference", inference.ready_timeout)
    return Endpoint(_root(address), config.model.name, key)


async def teacher_endpoint(config: RlConfig, env: str, run: RunDir) -> Endpoint | None:
    """The frozen teacher of an environment's algorithm, or None if it has no teacher.

    Without a `base_url` prl serves the teacher itself, as role `teacher/<env>` when the environment has its
    own algorithm and as `teacher/shared` when it follows the run's.
    """
    teacher: Any = getattr(algo_of(config, env), "teacher", None)
    if teacher is None:
        return None
    url = teacher.base_url
    if url is None:
        role = f"teacher/{'shared' if config.env[env].algo is None else env}"
        log.info("env.%s: waiting for %s", env, role)
        url = await run.wait_for_address(role, config.inference.ready_timeout)
    return Endpoint(_root(url), teacher.model, teacher.api_key_var, dict(teacher.headers), teacher.timeout)


def algo_of(config: RlConfig, env: str) -> Any:
    """Settings of the algorithm of an environment: its own, else the run's."""
    return config.env[env].algo or config.algo


def sampling_of(config: RlConfig, env: str) -> dict[str, Any]:
    """Sampling of an environment: the run's values under its own; what is null is left to the engine."""
    shared = dict(vars(config.rollout.sampling))
    own = {name: value for name, value in vars(config.env[env].sampling).items() if value is not None}
    extra = {**shared.pop("extra_body"), **own.pop("extra_body")}
    return {name: value for name, value in {**extra, **shared, **own}.items() if value is not None}


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
