"""Rules of `rollout.sampling` and `env.<name>.sampling`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from prl.config.errors import Problem
from prl.config.rules_rl import sources
from prl.config.schema import EvalConfig, RlConfig
from prl.config.sources import SamplingConfig

NEUTRAL = {"top_p": (None, 1), "top_k": (None, -1, 0), "min_p": (None, 0)}
"""Values that filter nothing. The first is "not set"; the second the one to recommend."""
FILTERS = {"top_p": "nucleus sampling", "top_k": "top-k sampling", "min_p": "min-p sampling"}
DISTORTING = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "structured_outputs",
    "response_format",
)
"""Keys of a request that change the distribution without the learner's knowledge."""


def sampling_is_what_the_learner_models(config: RlConfig) -> Iterator[Problem]:
    """The learner's logprobs are of the whole vocabulary; imitated teachers may sample as they like."""
    for source in sources(config):
        if config.env[source.env].sampling.temperature == 0:
            path = f"env.{source.env}.sampling.temperature"
            reason = "greedy rollouts of a task are all the same: nothing to learn from"
            yield Problem(path, 0, reason, f"Set {path}=1.")
        if source.algo.name == "sft":
            continue
        for path, node in _nodes(config, source.env):
            yield from _filters(path, node)
            for key in sorted(set(node.get("extra_body", {})) & set(DISTORTING)):
                reason = "the learner does not model it: its logprobs are of the undistorted distribution"
                yield Problem(f"{path}.extra_body.{key}", node["extra_body"][key], reason, "Leave it out.")


def _nodes(config: RlConfig, env: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "rollout.sampling", vars(config.rollout.sampling)
    yield f"env.{env}.sampling", vars(config.env[env].sampling)


def _filters(path: str, node: dict[str, Any]) -> Iterator[Problem]:
    for key, neutral in NEUTRAL.items():
        if node.get(key) not in neutral:
            reason = f"the learner does not model {FILTERS[key]}"
            yield Problem(f"{path}.{key}", node[key], reason, f"Set {path}.{key}={neutral[1]}.")


def extra_keys_have_no_field(config: RlConfig | EvalConfig) -> Iterator[Problem]:
    """A key that is given twice, as a field and in `extra_body`, would be decided silently."""
    fields = {entry.name for entry in dataclasses.fields(SamplingConfig)} | {"max_completion_tokens"}
    nodes: dict[str, Any] = {f"env.{name}.sampling": env.sampling for name, env in config.env.items()}
    nodes["rollout.sampling"] = config.rollout.sampling
    for path, node in nodes.items():
        extra = getattr(node, "extra_body", {})
        for key in sorted(set(extra) & fields):
            field = key.replace("max_completion_tokens", "max_tokens")
            yield Problem(f"{path}.extra_body.{key}", extra[key], "it has a field", f"Set {path}.{field}.")
