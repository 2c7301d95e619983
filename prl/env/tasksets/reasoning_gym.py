"""Any data set of reasoning_gym: `env=[reasoning_gym] env.reasoning_gym.taskset.dataset=leg_counting`.

Procedural and offline; needs `pip install prl[reasoning_gym]`. The answer is what the reply has in
`<answer>` tags; the data set's own scorer judges it.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from prl.env.tasksets._brackets import reply
from prl.env.tasksets._shared_box import SharedBoxEnv

log = logging.getLogger(__name__)

TUPLE = "__tuple__"
SYSTEM = (
    "Solve the problem. Think first if you need to, then give the answer alone in <answer> </answer> tags."
)


class ReasoningGymData(vf.TaskData):
    dataset: str
    entry: str
    """The data set's own record, as `packed` writes it."""


class ReasoningGymTask(vf.Task[ReasoningGymData]):
    """Scored by the data set."""

    @vf.reward
    async def dataset_score(self, trace: vf.Trace) -> float:
        import reasoning_gym

        answer = reasoning_gym.utils.extract_answer(reply(trace), tag_name="answer")
        judge = reasoning_gym.get_score_answer_fn(self.data.dataset)
        try:
            return float(judge(answer, unpacked(self.data.entry)))
        except Exception as error:  # many judges parse without a check; what cannot be read is not right,
            # and would be left out of every mean as a fault of the environment
            log.info("%s cannot judge %.100r: %s", self.data.dataset, answer, error)
            return 0.0

    @vf.metric
    async def answered(self, trace: vf.Trace) -> float:
        return float("</answer>" in reply(trace))


class ReasoningGymConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    dataset: str = "leg_counting"
    """Name of the data set."""
    size: int = Field(100, ge=1)
    """Tasks of it."""
    seed: int = 0
    params: dict[str, Any] = Field(default_factory=dict)
    """Settings of the data set itself."""


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    """The first `size` records of the data set."""

    def load(self) -> Iterator[ReasoningGymTask]:
        for number, entry in enumerate(_records(self.config)):
            data = ReasoningGymData(
                name=f"{self.config.dataset}-{number}",
                prompt=entry["question"],
                system_prompt=SYSTEM,
                dataset=self.config.dataset,
                entry=packed(entry),
            )
            yield ReasoningGymTask(data, self.config.task)


def packed(entry: Any) -> str:
    """`entry` as JSON that keeps tuples: some judges compare with `==`, and a list never equals a tuple."""
    return json.dumps(_tagged(entry))


def unpacked(text: str) -> Any:
    """The entry that `packed` wrote."""
    return json.loads(text, object_hook=lambda tree: tuple(tree[TUPLE]) if TUPLE in tree else tree)


def _tagged(value: Any) -> Any:
    if isinstance(value, tuple):
        return {TUPLE: [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    return {key: _tagged(item) for key, item in value.items()} if isinstance(value, dict) else value


def _records(config: ReasoningGymConfig) -> Any:
    """Raises ValueError for a data set that is not there, or does not take the settings."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"reasoning_gym is not installed ({error}): pip install 'prl[reasoning_gym]'"
        ) from error
    if config.dataset not in DATASETS:
        near = difflib.get_close_matches(config.dataset, DATASETS, n=3)
        hint = f"did you mean {', '.join(near)}? " if near else ""
        raise ValueError(
            f"taskset.dataset={config.dataset!r}: {hint}reasoning_gym has {', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(
            config.dataset, size=config.size, seed=config.seed, **config.params
        )
    except (TypeError, AssertionError) as error:
        raise ValueError(f"taskset.params={config.params}: {config.dataset} refuses them: {error}") from error


__all__ = ["ReasoningGymTaskset", "SharedBoxEnv"]
