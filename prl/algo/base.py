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
from prl.config.rules_rl import algorithms
from prl.config.schema import RlConfig
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
    `longest`: tokens that whoever scores takes at most; None = not known.
    """

    env: str
    policy_scorer: Scorer | None = None
    teacher: Scorer | None = None
    render_prefix: Callable[[str], list[int]] | None = None
    longest: int | None = None


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

    Raises ValueError when there is none, when it is not an `Algorithm`, when `kwargs` do not fit it, and when
    it wants policy gradients on tokens that a teacher sampled.
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
    if found.sampled_by == "teacher" and found.action_loss != "ce":
        raise ValueError(
            f"{path}: a policy gradient needs the policy's own logprobs, so an algorithm that is sampled by "
            f"a teacher trains by action_loss='ce', not {found.action_loss!r}"
        )
    try:
        inspect.signature(found).bind(config, Services(env=""), **config.kwargs)
    except TypeError as error:
        raise ValueError(f"algo.kwargs={config.kwargs} does not fit {found.__name__} ({error})") from error
    return found


def import_own_algorithms(config: RlConfig) -> None:
    """Import every algorithm that prl does not ship, so that what is wrong with one is told before a start.

    Raises ValueError with the path of its settings.
    """
    for path, algo in algorithms(config).items():
        if algo.import_path is not None:
            try:
                algorithm_class(algo)
            except ValueError as error:
                raise ValueError(f"{path}={algo.name}: {error}") from error


def build_algorithm(
    config: AlgoConfig,
    *,
    env: str,
    policy_scorer: Scorer | None = None,
    teacher: Scorer | None = None,
    render_prefix: Callable[[str], list[int]] | None = None,
    longest: int | None = None,
) -> Algorithm[Any]:
    """The algorithm of one environment; `config.kwargs` become keyword arguments of its class.

    Raises ValueError for an unknown algorithm, wrong settings or a service that it needs and lacks.
    """
    services = Services(env, policy_scorer, teacher, render_prefix, longest)
    return algorithm_class(config)(config, services, **config.kwargs)
