"""Schema of the `algo` group: which credit a rollout earns. Behaviour: `prl/algo/`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prl.config.fields import opt


@dataclass
class EndpointConfig:
    """A frozen model: one that prl serves itself (`base_url: null`) or one served elsewhere."""

    model: str | None = opt(None, "Model name at the endpoint, or the model that prl serves (name or path).")
    base_url: str | None = opt(None, "OpenAI-style URL ending in /v1; null = prl serves `model` itself.")
    api_key_var: str = opt("PRL_API_KEY", "Name of the environment variable that holds the key.")
    headers: dict[str, str] = opt(factory=dict, doc="Extra HTTP headers.")
    timeout: float = opt(600.0, "Seconds one request may take.", gt=0)


@dataclass
class AlgoConfig:
    """What every algorithm has."""

    name: str = opt(doc="Name of the algorithm.")
    import_path: str | None = opt(None, "`package.module:Class` of an algorithm that prl does not ship.")
    kwargs: dict[str, Any] = opt(factory=dict, doc="Settings handed to an algorithm that prl does not ship.")


@dataclass
class LengthPenaltyConfig:
    """Linear length penalty of grpo; a weight of 0 disables its term."""

    output_tokens: float = opt(0.25, "Weight of sampled tokens.", ge=0)
    input_tokens: float = opt(0.1, "Weight of tokens that were not sampled.", ge=0)
    turns: float = opt(0.1, "Weight of turns.", ge=0)


@dataclass
class GrpoConfig(AlgoConfig):
    """Reward minus the mean of its group; no division by the standard deviation."""

    name: str = "grpo"
    length_penalty: LengthPenaltyConfig | None = opt(None, "Linear length penalty; null = none.")
    length_weighted_baseline: bool = opt(False, "Weight the baseline by sampled tokens.")
    loss_aggregation: str = opt(
        "token",
        "Weight of a token: 1, or 1 / sampled tokens of its prompt's group.",
        choices=("token", "prompt"),
    )


@dataclass
class MaxRlConfig(AlgoConfig):
    """Reward minus group mean, divided by the group mean; for rewards of 0 and more."""

    name: str = "max_rl"


@dataclass
class RaeConfig(AlgoConfig):
    """Running baseline per environment and agent; works with groups of one."""

    name: str = "rae"
    decay: float = opt(0.95, "Decay of the running baseline.", ge=0, lt=1)


@dataclass
class HierarchicalGrpoConfig(AlgoConfig):
    """Group baseline per agent; agents in `episode_agents` compare within their episode only."""

    name: str = "hierarchical_grpo"
    episode_agents: list[str] = opt(factory=lambda: ["solver"], doc="Agents compared within one episode.")


@dataclass
class OpdConfig(AlgoConfig):
    """On-policy distillation: reverse KL to a teacher on the policy's own tokens."""

    name: str = "opd"
    teacher: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class OpsdConfig(AlgoConfig):
    """On-policy self-distillation: the policy, shown a demonstration, teaches itself."""

    name: str = "opsd"
    demo_key: str = opt("demonstration", "Field of the task (its info first) that holds the demonstration.")
    template: str = opt(
        "Here is a demonstration of a good answer.\n<demonstration>\n{demonstration}\n</demonstration>",
        "System message; must contain {demonstration}.",
    )


@dataclass
class SftAlgoConfig(AlgoConfig):
    """Hard distillation on the fly: a teacher samples, the policy learns its tokens."""

    name: str = "sft"
    teacher: EndpointConfig = field(default_factory=EndpointConfig)


@dataclass
class EchoRoleConfig:
    """Cross-entropy on the tokens of one message role."""

    alpha: float = opt(0.1, "Weight of a token of this role.", gt=0)


@dataclass
class EchoFilterConfig:
    """A user function that removes tokens from echo's cross-entropy."""

    import_path: str = opt(doc="`package.module:function(trace, **kwargs)`; one list of bools per branch.")
    kwargs: dict[str, Any] = opt(factory=dict, doc="Arguments of the function.")


@dataclass
class EchoConfig(GrpoConfig):
    """grpo plus cross-entropy on what the environment said (tool output by default)."""

    name: str = "echo"
    roles: dict[str, EchoRoleConfig] = opt(
        factory=lambda: {"tool": EchoRoleConfig()},
        doc="Roles that are learned; setting any replaces the table.",
        replaced=True,
    )
    filter: EchoFilterConfig | None = opt(None, "Removes tokens by a user function.")
