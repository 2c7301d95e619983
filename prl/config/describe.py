"""The short plan of a run, in words: what trains on what, what rules the loss, where it all goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prl.config import identity
from prl.config.rules_rl import Source, sources
from prl.config.schema import RlConfig, SftConfig

COMPONENTS = {"opd": "ref_kl", "opsd": "ref_kl", "sft": "ce"}
"""Algorithm -> the loss component of its action tokens; every other shipped algorithm earns rl credit."""


def describe_plan(config: RlConfig | SftConfig) -> str:
    """A few aligned lines about a run that is about to start (or would, in a dry run)."""
    rows = _rl_rows(config) if isinstance(config, RlConfig) else _sft_rows(config)
    rows += [
        ("optimizer", f"{config.optim.name}, lr {config.optim.lr:g}, {_schedule(config)}"),
        ("steps", "no end" if config.max_steps is None else f"to {config.max_steps}"),
        ("checkpoints", _checkpoints(config)),
        ("directory", str(identity.run_path(config).absolute())),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:{width}}  {text}" for label, text in rows)


def _rl_rows(config: RlConfig) -> list[tuple[str, str]]:
    found = sources(config)
    rollout, sampling = config.rollout, config.rollout.sampling
    return [
        ("model", _model(config)),
        ("algo", "; ".join(_algo(group) for group in _by_algo(found))),
        ("loss", "; ".join(components(config))),
        ("env", ", ".join(_share(config, source) for source in found)),
        (
            "batch",
            f"{rollout.batch_size} rollouts, groups of {_sizes(found)}, "
            f"at most {rollout.max_off_policy_steps} steps off policy, temperature {sampling.temperature:g}",
        ),
        *([("eval", _evals(config))] if config.eval.env else []),
        ("processes", _processes(config)),
    ]


def _sft_rows(config: SftConfig) -> list[tuple[str, str]]:
    return [
        ("model", _model(config)),
        ("data", _data(config)),
        ("validation", _validation(config)),
        *([("evaluation", ", ".join(config.eval.env))] if config.eval.env else []),
        ("loss", "ce: cross-entropy"),
        ("processes", f"{_trainer(config)}"),
    ]


def _data(config: SftConfig) -> str:
    """`rows from chats.jsonl, 8 rows of 2048 tokens a step (cat)`."""
    data = config.data
    source = f"{data.name} from {data.path}" if hasattr(data, "path") else data.name
    unit = {"cat": f"rows of {config.trainer.seq_len} tokens", "stack": "documents", "fit": "samples"}
    return f"{source}, {data.batch_size} {unit[data.packing]} a step ({data.packing})"


def _validation(config: SftConfig) -> str:
    val = config.val
    if val.data is None:
        return "none"
    start = "at the start, " if val.at_start else ""
    return f"{val.data.name}, {start}every {val.interval} steps and at the end"


def components(config: RlConfig) -> list[str]:
    """Loss components that the run's algorithms feed, each with the rule that governs it."""
    loss = config.loss.name
    one_sided = config.loss.ref_kl == "one_sided"
    rules = {
        "rl": f"rl by {loss}",
        "ref_kl": "ref_kl by the one-sided rule" if one_sided else f"ref_kl by {loss}",
        "ce": "ce: cross-entropy, which the loss does not touch",
    }
    fed: dict[str, str] = {}
    for source in sources(config):
        if source.algo.import_path:
            fed["own"] = f"whatever {source.algo.import_path} declares, policy gradients by {loss}"
            continue
        component = COMPONENTS.get(source.algo.name, "rl")
        fed[component] = rules[component]
        if source.algo.name == "echo":
            fed["ce"] = rules["ce"]
    return list(fed.values())


def _by_algo(found: list[Source]) -> list[list[Source]]:
    grouped: dict[str, list[Source]] = {}
    for source in found:
        grouped.setdefault(source.algo_path, []).append(source)
    return list(grouped.values())


def _algo(users: list[Source]) -> str:
    algo, path = users[0].algo, users[0].algo_path
    place = "" if path == "algo" else f" for {users[0].env}"
    teacher = getattr(algo, "teacher", None)
    if teacher is None:
        return f"{algo.name}{place}"
    served = teacher.base_url or "served by this run"
    return f"{algo.name}{place}, teacher {teacher.model} ({served})"


def _share(config: RlConfig, source: Source) -> str:
    total = sum(env.ratio for env in config.env.values())
    share = config.env[source.env].ratio / total
    return source.env if share == 1 else f"{source.env} {share:.0%}"


def _sizes(found: list[Source]) -> str:
    return " or ".join(str(size) for size in sorted({source.group_size for source in found}))


def _model(config: Any) -> str:
    model = config.model
    where = str(Path(model.path)) if model.path else "bundled with prl"
    extra = ", random weights" if model.random_init else ""
    return f"{model.name} ({where}{extra})"


def _trainer(config: Any) -> str:
    ranks = config.cluster.train_ranks
    return f"{ranks} trainer rank{'s' * (ranks != 1)} (ZeRO {config.zero.stage})"


def _processes(config: RlConfig) -> str:
    engine = getattr(config.inference, "base_url", None) or f"1 {config.inference.name} engine"
    envs = len(config.env) + len(config.eval.env)
    servers = f"{envs} environment server{'s' * (envs != 1)}"
    return f"{engine}, {servers}, orchestrator, {_trainer(config)}; {config.cluster.name}"


def _evals(config: Any) -> str:
    """`reverse_text every 5 versions, each of one version`."""
    shared = config.eval
    found = [f"{name} every {env.interval or shared.interval}" for name, env in shared.env.items()]
    start = "" if shared.skip_first_step else "at the start, "
    return f"{', '.join(found)} versions, {start}at the end" + (
        "" if shared.pin_version else ", versions may mix"
    )


def _schedule(config: Any) -> str:
    scheduler = config.scheduler
    warmup = getattr(scheduler, "warmup_steps", 0)
    return f"{scheduler.name}" + (f" after {warmup} steps of warm-up" if warmup else "")


def _checkpoints(config: Any) -> str:
    ckpt = config.ckpt
    when = [f"every {ckpt.interval} steps"] if ckpt.interval else []
    when += ["at the end"] if ckpt.at_end else []
    resumed = f"; resumes from {config.run.resume}" if config.run.resume else ""
    return (" and ".join(when) or "none") + resumed
