"""Everything outside the orchestrator that it talks to, connected: engine, environments, teachers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prl.algo import Algorithm, build_algorithm
from prl.config.schema import RlConfig
from prl.curriculum import Curriculum, build_curriculum
from prl.env.renderers import load_renderer
from prl.env.source import EnvSource
from prl.inference.client import ROUTES, EngineAdmin, LogprobScorer
from prl.orchestrator.endpoints import Endpoint, algo_of, policy_endpoint, sampling_of, teacher_endpoint
from prl.orchestrator.episodes import RolloutSource
from prl.orchestrator.eval_epoch import EvalSource
from prl.orchestrator.eval_sources import connect_evals
from prl.orchestrator.succession import Succession
from prl.run_dir import RunDir


@dataclass(frozen=True)
class Connected:
    """Per environment: how to roll out, which credit, which task next. And the engine's admin routes, where
    it is, and what to evaluate on."""

    engine: EngineAdmin
    sources: Mapping[str, RolloutSource]
    algorithms: Mapping[str, Algorithm[Any]]
    curricula: Mapping[str, Curriculum[Any]]
    engine_roots: Sequence[str] = ()
    evals: Sequence[EvalSource] = ()


async def connect(config: RlConfig, run: RunDir, stack: contextlib.AsyncExitStack) -> Connected:
    """Wait for the engine, the environment servers and the teachers; `stack` closes what was opened.

    Raises TimeoutError when one does not come up, ValueError for settings that do not fit them.
    """
    policy = await policy_endpoint(config, run)
    engine = EngineAdmin(
        policy.root, config.inference.admin_timeout, policy.headers, policy.api_key_var, routes=ROUTES
    )
    stack.push_async_callback(engine.aclose)
    envs = {name: await asyncio.to_thread(EnvSource, name, env, config) for name, env in config.env.items()}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.wait_ready(policy.model, config.inference.ready_timeout))
        for env in envs.values():
            tasks.create_task(_start(env, run, config.cluster.start_timeout))
            stack.push_async_callback(env.close)
    sources, algorithms, curricula = {}, {}, {}
    for name, env in envs.items():
        teacher = await teacher_endpoint(config, name, run)
        algorithms[name] = await _algorithm(config, name, policy, teacher, stack)
        sources[name] = _rollout_source(config, name, env, algorithms[name], policy, teacher)
        curricula[name] = build_curriculum(
            config.env[name].curriculum or config.curriculum, env=name, tasks=env.tasks, endless=env.endless
        )
    evals = await connect_evals(config, run, base_url=policy.v1, model=policy.model, stack=stack)
    return Connected(engine, sources, algorithms, curricula, [policy.root], evals)


async def _start(env: EnvSource, run: RunDir, patience: float) -> None:
    succession = Succession(run, f"env/{env.name}", patience)
    await env.start(await succession.next(), succession.next)


async def _algorithm(
    config: RlConfig, env: str, policy: Endpoint, teacher: Endpoint | None, stack: contextlib.AsyncExitStack
) -> Algorithm[Any]:
    """The algorithm of an environment with the services that it may ask."""
    scorers = [_scorer(endpoint, stack) if endpoint else None for endpoint in (policy, teacher)]
    if teacher and scorers[1]:
        await _check_teacher(env, teacher, scorers[1])
    algorithm = build_algorithm(
        algo_of(config, env),
        env=env,
        policy_scorer=scorers[0],
        teacher=scorers[1],
        render_prefix=_prefix_renderer(config),
        longest=_longest_scored(config, env),
    )
    await algorithm.setup()
    return algorithm


def _longest_scored(config: RlConfig, env: str) -> int | None:
    """Tokens that fit the engine that scores them; not known of a teacher that is served elsewhere.

    vLLM, unlike the embedded engine, needs room for the one token that a request must sample.
    """
    teacher: Any = getattr(algo_of(config, env), "teacher", None)
    if teacher is not None and teacher.base_url is not None:
        return None
    return config.inference.max_model_len - (config.inference.name != "embedded")


async def _check_teacher(env: str, teacher: Endpoint, scorer: LogprobScorer) -> None:
    """A teacher takes token ids, which a chat API does not: better told before the first rollout."""
    try:
        await scorer.score([0, 0])
    except (ValueError, ConnectionError) as error:
        raise ValueError(
            f"env.{env}: teacher {teacher.model!r} at {teacher.root} cannot score tokens: {error}"
        ) from error


def _scorer(endpoint: Endpoint, stack: contextlib.AsyncExitStack) -> LogprobScorer:
    scorer = LogprobScorer(
        endpoint.root, endpoint.model, endpoint.api_key_var, endpoint.headers, endpoint.timeout
    )
    stack.push_async_callback(scorer.aclose)
    return scorer


def _prefix_renderer(config: RlConfig) -> Callable[[str], list[int]]:
    """Tokens of one leading system message, without a generation prompt. The renderer comes on first use."""
    renderer = functools.cache(lambda: load_renderer(config.model))

    def render(text: str) -> list[int]:
        message = {"role": "system", "content": text}
        return list(renderer().render_ids([message], add_generation_prompt=False))

    return render


def _rollout_source(
    config: RlConfig,
    name: str,
    env: EnvSource,
    algorithm: Algorithm[Any],
    policy: Endpoint,
    teacher: Endpoint | None,
) -> RolloutSource:
    frozen = algorithm.sampled_by == "teacher"
    if frozen and teacher is None:
        raise ValueError(
            f"env.{name}: algo {algo_of(config, name).name!r} samples from a teacher and names none"
        )
    endpoint, run = policy, env.run
    if frozen and teacher:
        access = {"api_key_var": teacher.api_key_var, "headers": teacher.headers}
        endpoint, run = teacher, functools.partial(env.run, access=access)
    return RolloutSource(
        env=name,
        run=run,
        group_size=config.env[name].group_size or config.rollout.group_size,
        sampling=sampling_of(config, name),
        timeout=config.env[name].timeout,
        base_url=endpoint.v1,
        model=endpoint.model,
        frozen=frozen,
    )
