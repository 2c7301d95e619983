"""When `prl sft` publishes weights: at the versions that an evaluation is due at, and no other."""

from __future__ import annotations

from pathlib import Path

from prl.config.schema import SftConfig


def first_version(config: SftConfig) -> int:
    """The version that a run begins with: 0, or the step of the checkpoint it resumes from."""
    resume = config.run.resume
    return 0 if resume is None else int(Path(resume).name.removeprefix("step_"))


def publishes(config: SftConfig, version: int) -> bool:
    """Whether v`version` is wanted: the first, the last, and where some environment's interval ends."""
    if not config.eval.env:
        return False
    intervals = [env.interval or config.eval.interval for env in config.eval.env.values()]
    edge = version in (first_version(config), config.max_steps)
    return edge or any(version % interval == 0 for interval in intervals)
