"""Rules of `prl rl`: environments, rollouts, algorithms, losses, engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from prl.config.algo import (
    EchoConfig,
    GrpoConfig,
    HierarchicalGrpoConfig,
    OpsdConfig,
)
from prl.config.curriculum import DifficultyPoolConfig
from prl.config.errors import Problem
from prl.config.loss import CispoConfig, CustomLossConfig, IcePopConfig, PpoConfig
from prl.config.rules_training import check_import_path
from prl.config.schema import RlConfig
from prl.config.serving import ExternalConfig

GROUP_RELATIVE = ("grpo", "max_rl", "echo", "hierarchical_grpo")
"""Algorithms whose credit is zero in a group of one."""

WEIGHS_TOKENS_ALIKE = ("max_rl", "rae", "hierarchical_grpo")
"""Algorithms of the rl component whose tokens have a weight of 1, whatever their group."""

RESERVED_ENVS = ("agg", "all")
"""Names under which metrics over all environments are kept."""

MESSAGE_ROLES = ("system", "user", "assistant", "tool")


class Source(NamedTuple):
    """An environment with what it inherits from the run, and the paths that decided it."""

    env: str
    algo: Any
    algo_path: str
    group_size: int
    group_path: str


def sources(config: RlConfig) -> list[Source]:
    return [
        Source(
            name,
            env.algo or config.algo,
            f"env.{name}.algo" if env.algo else "algo",
            env.group_size or config.rollout.group_size,
            f"env.{name}.group_size" if env.group_size else "rollout.group_size",
        )
        for name, env in config.env.items()
    ]


def algorithms(config: RlConfig) -> dict[str, Any]:
    """Every algorithm of the run by the path of its node."""
    own = {f"env.{name}.algo": env.algo for name, env in config.env.items() if env.algo}
    return {"algo": config.algo, **own}


def environments_are_named(config: RlConfig) -> Iterator[Problem]:
    if not config.env:
        yield Problem("env", "[]", "a run needs at least one environment", "Write env=[reverse_text].")
    for name in config.env:
        if name in RESERVED_ENVS:
            yield Problem(f"env.{name}", name, "this name stands for all environments in the metrics")
        elif not re.fullmatch(r"[\w-]+", name):
            yield Problem(f"env.{name}", name, "a name of letters, digits, `_` and `-` is needed")
        yield from _is_described(f"env.{name}", config.env[name])


def _is_described(path: str, env: Any) -> Iterator[Problem]:
    if env.id is not None and not env.id.strip():
        yield Problem(f"{path}.id", env.id, "a taskset is needed", "Leave it out to take the name.")
    seats = env.seats
    if seats is not None and (not seats or len(set(seats)) < len(seats)):
        reason = "different names of its agents are needed"
        yield Problem(f"{path}.seats", seats, reason, "null stands for one agent.")


def batches_hold_whole_groups(config: RlConfig) -> Iterator[Problem]:
    batch = config.rollout.batch_size
    sizes = {"rollout.group_size": config.rollout.group_size}
    sizes |= {source.group_path: source.group_size for source in sources(config)}
    for path, size in sizes.items():
        if batch % size:
            low = batch // size * size
            near = f"{low} or {low + size}" if low else str(size)
            divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
            reason = f"rollout.batch_size = {batch} does not hold whole groups of {size}"
            remedy = f"Nearest batch sizes: {near}; group sizes that fit: {divisors}."
            yield Problem(path, size, reason, remedy, ("rollout.batch_size",))


def groups_fit_in_flight(config: RlConfig) -> Iterator[Problem]:
    rollout = config.rollout
    for key in ("max_inflight", "initial_inflight"):
        limit = getattr(rollout, key)
        for source in sources(config):
            if limit is not None and limit < source.group_size:
                reason = (
                    f"fewer than one group of env.{source.env} ({source.group_path} = {source.group_size})"
                )
                remedy = f"Set at least {source.group_size}."
                yield Problem(f"rollout.{key}", limit, reason, remedy, (source.group_path,))


def bounds_in_flight_are_ordered(config: RlConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.max_inflight is None:
        return
    for key in ("min_inflight", "initial_inflight"):
        value = getattr(rollout, key)
        if value is not None and value > rollout.max_inflight:
            reason = f"above rollout.max_inflight = {rollout.max_inflight}"
            yield Problem(f"rollout.{key}", value, reason, "", ("rollout.max_inflight",))


def groups_have_peers(config: RlConfig) -> Iterator[Problem]:
    for source in sources(config):
        if source.algo.name in GROUP_RELATIVE and source.group_size == 1:
            chosen = f"{source.algo_path}={source.algo.name}"
            reason = f"{chosen} compares rollouts of one task, a group of one earns nothing"
            remedy = f"Set {source.group_path}=8, or algo=rae, which needs no group."
            yield Problem(source.group_path, 1, reason, remedy, (source.algo_path,))


def completions_leave_room(config: RlConfig) -> Iterator[Problem]:
    longest = config.inference.max_model_len
    nodes: dict[str, Any] = {"rollout.sampling": config.rollout.sampling}
    nodes |= {f"env.{name}.sampling": env.sampling for name, env in config.env.items()}
    for path, node in nodes.items():
        if node.max_tokens is not None and node.max_tokens >= longest:
            reason = f"leaves no room for a prompt within inference.max_model_len = {longest}"
            yield Problem(
                f"{path}.max_tokens",
                node.max_tokens,
                reason,
                f"Set at most {longest - 1}.",
                ("inference.max_model_len",),
            )


def rows_hold_the_context(config: RlConfig) -> Iterator[Problem]:
    row, context = config.trainer.seq_len, config.inference.max_model_len
    if row < context:
        reason = f"shorter than inference.max_model_len = {context}: longer samples will be cut"
        remedy = f"Set trainer.seq_len={context} to train on all of them."
        yield Problem("trainer.seq_len", row, reason, remedy, ("inference.max_model_len",), warning=True)


def algorithms_are_complete(config: RlConfig) -> Iterator[Problem]:
    for path, algo in algorithms(config).items():
        if isinstance(algo, OpsdConfig) and "{demonstration}" not in algo.template:
            remedy = "Put {demonstration} where the task's demonstration shall stand."
            yield Problem(f"{path}.template", algo.template, "has no {demonstration}", remedy)
        if isinstance(algo, HierarchicalGrpoConfig) and not algo.episode_agents:
            yield Problem(f"{path}.episode_agents", "[]", "at least one agent is needed", "Write [solver].")
        if isinstance(algo, EchoConfig):
            yield from _echo_roles(path, algo)
        yield from check_import_path(f"{path}.import_path", algo.import_path)


def hierarchies_have_agents(config: RlConfig) -> Iterator[Problem]:
    """hierarchical_grpo compares agents, so the environment must have several, those it names among them."""
    for source in sources(config):
        if not isinstance(source.algo, HierarchicalGrpoConfig):
            continue
        seats = config.env[source.env].seats or []
        absent = [agent for agent in source.algo.episode_agents if agent not in seats]
        if len(seats) < 2:
            reason = f"env.{source.env} has one agent; hierarchical_grpo compares several"
            remedy = f"Choose env=[proposer_solver], or list the agents in env.{source.env}.seats."
            involves = (f"env.{source.env}.seats",)
            yield Problem(f"{source.algo_path}.name", source.algo.name, reason, remedy, involves)
        elif absent:
            reason = f"env.{source.env} has no agent {', '.join(absent)}"
            path = f"{source.algo_path}.episode_agents"
            yield Problem(path, source.algo.episode_agents, reason, f"Its agents: {', '.join(seats)}.")


def _echo_roles(path: str, algo: EchoConfig) -> Iterator[Problem]:
    if not algo.roles:
        remedy = f"Write {path}.roles.tool.alpha=0.1, or choose algo=grpo."
        yield Problem(f"{path}.roles", "{}", "echo without a role learns nothing from it", remedy)
    for role in algo.roles:
        if role not in MESSAGE_ROLES:
            yield Problem(
                f"{path}.roles.{role}", role, "no such message role", f"Valid: {', '.join(MESSAGE_ROLES)}."
            )
    if algo.filter is not None:
        yield from check_import_path(f"{path}.filter.import_path", algo.filter.import_path)


def token_weights_agree(config: RlConfig) -> Iterator[Problem]:
    """A loss is a sum over all environments' tokens; two meanings of one token's weight cannot be summed."""
    found = {s.algo_path: s.algo.loss_aggregation for s in sources(config) if isinstance(s.algo, GrpoConfig)}
    first, *others = found.items() or [("", "")]
    for path, value in others:
        if value != first[1]:
            reason = f"{first[0]}.loss_aggregation = {first[1]} must be the same for all environments"
            involves = (f"{first[0]}.loss_aggregation",)
            yield Problem(f"{path}.loss_aggregation", value, reason, f"Set both to {value}.", involves)
    alike = [s for s in sources(config) if s.algo.name in WEIGHS_TOKENS_ALIKE]
    for path, value in found.items():
        if value == "prompt" and alike:
            other = alike[0]
            reason = f"{other.algo_path}={other.algo.name} gives each token of env.{other.env} a weight of 1"
            remedy = f"Set {path}.loss_aggregation=token."
            yield Problem(f"{path}.loss_aggregation", value, reason, remedy, (other.algo_path,))


def distillation_samples_at_one(config: RlConfig) -> Iterator[Problem]:
    for source in sources(config):
        own = config.env[source.env].sampling.temperature
        temperature = config.rollout.sampling.temperature if own is None else own
        if source.algo.name in ("opd", "opsd") and temperature != 1:
            path = "rollout.sampling.temperature" if own is None else f"env.{source.env}.sampling.temperature"
            reason = (
                f"{source.algo_path}={source.algo.name} compares with a teacher that scores at temperature 1"
            )
            yield Problem(path, temperature, reason, f"Set {path}=1.", (source.algo_path,), warning=True)


def loss_bounds_are_ordered(config: RlConfig) -> Iterator[Problem]:
    loss = config.loss
    if isinstance(loss, IcePopConfig | CispoConfig) and loss.ratio_low > loss.ratio_high:
        reason = f"above loss.ratio_high = {loss.ratio_high:g}"
        yield Problem("loss.ratio_low", loss.ratio_low, reason, "", ("loss.ratio_high",))
    if isinstance(loss, PpoConfig) and loss.max_importance_ratio < loss.ratio_high:
        reason = f"the cap lies below loss.ratio_high = {loss.ratio_high:g}, which then never acts"
        yield Problem(
            "loss.max_importance_ratio", loss.max_importance_ratio, reason, "", ("loss.ratio_high",)
        )
    if isinstance(loss, CustomLossConfig):
        yield from check_import_path("loss.import_path", loss.import_path)


def curricula_are_sound(config: RlConfig) -> Iterator[Problem]:
    own = {f"env.{name}.curriculum": env.curriculum for name, env in config.env.items() if env.curriculum}
    for path, curriculum in {"curriculum": config.curriculum, **own}.items():
        for name, gate in curriculum.gates.items():
            if gate.reject_min > gate.reject_max:
                reason = f"above reject_max = {gate.reject_max:g}, so nothing is rejected"
                involves = (f"{path}.gates.{name}.reject_max",)
                yield Problem(f"{path}.gates.{name}.reject_min", gate.reject_min, reason, "", involves)
        if isinstance(curriculum, DifficultyPoolConfig):
            yield from _pools(f"{path}.pools", curriculum)


def _pools(path: str, curriculum: DifficultyPoolConfig) -> Iterator[Problem]:
    pools = curriculum.pools
    if not pools:
        yield Problem(path, "{}", "at least one pool is needed", "Or choose curriculum=standard.")
    if not any([curriculum.unseen_weight, *(pool.weight for pool in pools.values())]):
        yield Problem(path, ", ".join(pools), "no weight is above 0, so no task could be drawn")
    taken: dict[float, str] = {}
    for name, pool in pools.items():
        if pool.max_reward in taken:
            reason = f"{path}.{taken[pool.max_reward]} ends at the same reward"
            yield Problem(f"{path}.{name}.max_reward", pool.max_reward, reason)
        taken[pool.max_reward] = name


def engine_has_an_address(config: RlConfig) -> Iterator[Problem]:
    if isinstance(config.inference, ExternalConfig):
        yield from check_api_url("inference.base_url", config.inference.base_url)


def check_api_url(path: str, url: str | None) -> Iterator[Problem]:
    if url is None:
        return
    if not re.match(r"https?://[^/]+", url):
        yield Problem(path, url, "not a URL", f"Write {path}=http://host:port/v1.")
    elif not url.rstrip("/").endswith("/v1"):
        yield Problem(path, url, "must end in /v1", f"Write {path}={url.rstrip('/')}/v1.")
