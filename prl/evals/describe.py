"""The short plan of an evaluation, in words."""

from __future__ import annotations

from pathlib import Path

from prl.config.schema import EvalConfig
from prl.config.sources import EnvConfig


def describe_evaluation(config: EvalConfig, path: Path) -> str:
    """A few aligned lines about an evaluation that is about to start (or would, in a dry run)."""
    engine = f"1 {config.inference.name} engine"
    if config.inference.name == "external":
        engine = config.inference.base_url
    where = config.model.path or (
        "at the endpoint" if config.inference.name == "external" else "bundled with prl"
    )
    rules = config.eval
    fate = "reward 0" if rules.errors == "zero" else "left out of the means"
    rows = [
        ("model", f"{config.model.name} ({where})"),
        *(
            ("env" if not index else "", _env(name, env))
            for index, (name, env) in enumerate(config.env.items())
        ),
        ("engine", f"{engine}, at most {config.concurrency} rollouts at once"),
        (
            "errors",
            f"{rules.retries} retries; then {fate}",
        ),
        ("directory", str(path)),
    ]
    if config.steps:
        rows.insert(1, ("steps", f"{', '.join(map(str, config.steps))} of {config.checkpoints}"))
    return "\n".join(f"{label:10}  {text}" for label, text in rows)


def _env(name: str, env: EnvConfig) -> str:
    select = env.select
    tasks = "all tasks" if select.limit is None else f"{select.limit} task{'s' * (select.limit != 1)}"
    extra = ["shuffled"] if select.shuffle else []
    extra += [f"{key} {value}" for key, value in vars(env.sampling).items() if value not in (None, {})]
    times = f"{env.group_size} rollout{'s' * (env.group_size != 1)} each"
    return ", ".join([f"{name}: {tasks}, {times}", *extra])
