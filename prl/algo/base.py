"""What an algorithm is, the table of those that prl ships, and how one is built.

An algorithm is one class with `score_episode` and/or `score_group`. It writes onto the nodes of the
traces: `advantages` (rl), `ref_logprobs` (ref_kl) or `loss_weights` (any component). `prl.algo.samples`
then routes the sampled tokens into the component that `action_loss` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from prl.config.algo import AlgoConfig
from prl.import_path import load_object
from prl.records import Component, Episode

ALGORITHMS: dict[str, str] = {
    "grpo": "prl.algo.grpo:Grpo",
    "max_rl": "prl.algo.max_rl:MaxRl",
    "rae": "prl.algo.rae:Rae",
    "hierarchical_grpo": "prl.algo.hierarchical_grpo:HierarchicalGrpo",
    "opd": "prl.algo.opd:Opd",
    "opsd": "prl.algo.opsd:Opsd",
    "sft": "prl.algo.sft:Sft",
    "echo": "prl.algo.echo:Echo",
}
"""Name -> where its class is; imported only when it is chosen."""


class Scorer(Protocol):
    """A model that tells how likely given tokens are."""

    async def score(self, token_ids: list[int], cache_salt: str | None = None) -> list[float]:
        """Logprob of each token given those before it; position 0 has 0.0. Length of `token_ids`."""
        ...


@dataclass(frozen=True)
class Services:
    """What an algorithm may use besides its settings.

    `policy_scorer` is the live policy, `teacher` the frozen model that the settings name;
    `render_prefix` gives the tokens of one leading system message, without a generation prompt.
    """

    env: str
    policy_scorer: Scorer | None = None
    teacher: Scorer | None = None
    render_prefix: Callable[[str], list[int]] | None = None


C = TypeVar("C", bound=AlgoConfig)


class Algorithm(Generic[C]):
    """Credit of one environment's rollouts. A hook that raises ends the run."""

    action_loss: ClassVar[Component] = "rl"
    """Component that trains the tokens which the policy (or the teacher) sampled."""
    sampled_by: ClassVar[Literal["policy", "teacher"]] = "policy"
    """Which model samples the rollouts."""

    def __init__(self, config: C, services: Services) -> None:
        self.config = config
        self.services = services

    async def setup(self) -> None:
        """Runs once, after the engines are ready and before the first rollout."""

    async def score_episode(self, episode: Episode) -> None:
        """Runs when an episode arrives that has at least one trainable trace."""

    async def score_group(self, episodes: list[Episode]) -> None:
        """Runs once for a whole group with at least one trainable trace; episodes in order of arrival."""

    def metrics(self) -> dict[str, float]:
        """What it shows of itself with every batch, under `algo/<env>/`."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What must survive a resume, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`. Raises ValueError on state of another kind of algorithm."""
        if state:
            raise ValueError(
                f"algo {self.config.name!r} keeps no state, but the checkpoint holds {sorted(state)}"
            )


def algorithm_class(config: AlgoConfig) -> type[Algorithm[Any]]:
    """Class of an algorithm: the user's (`import_path`) or the one shipped under `name`.

    Raises ValueError when there is none or when it is not an `Algorithm`.
    """
    if config.import_path is None and config.name not in ALGORITHMS:
        raise ValueError(
            f"algo.name={config.name!r} is unknown; choose one of {', '.join(ALGORITHMS)}, "
            "or set algo.import_path to a class of your own"
        )
    path = config.import_path or ALGORITHMS[config.name]
    found = load_object(path, "algo.import_path")
    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        raise ValueError(f"algo.import_path={path!r} must be a subclass of prl.algo.Algorithm")
    return found


def build_algorithm(
    config: AlgoConfig,
    *,
    env: str,
    policy_scorer: Scorer | None = None,
    teacher: Scorer | None = None,
    render_prefix: Callable[[str], list[int]] | None = None,
) -> Algorithm[Any]:
    """The algorithm of one environment; `config.kwargs` become keyword arguments of its class.

    Raises ValueError for an unknown algorithm, wrong settings or a service that it needs and lacks.
    """
    cls = algorithm_class(config)
    services = Services(env, policy_scorer, teacher, render_prefix)
    try:
        inspect.signature(cls).bind(config, services, **config.kwargs)
    except TypeError as error:
        raise ValueError(f"algo.kwargs={config.kwargs} does not fit {cls.__name__} ({error})") from error
    return cls(config, services, **config.kwargs)
