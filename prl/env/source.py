"""One environment as the orchestrator uses it: its tasks, and a way to run an episode of one.

The client owns the tasks; the environment server, another process, runs the rollouts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import verifiers.v1 as vf

from prl.config.schema import EvalConfig, RlConfig
from prl.config.sources import EnvConfig, SelectConfig
from prl.env.client import EnvServerClient, EnvServerDied
from prl.env.convert import convert_episode, failed_episode
from prl.env.environment import environment_config
from prl.env.renderers import renderer_config
from prl.model_path import resolve_model_path
from prl.records import Episode, TraceError

__all__ = ["EnvServerDied", "EnvSource", "Task"]

log = logging.getLogger(__name__)

MOST_BUILT = 256
"""Requests' settings kept: each policy version has sampling settings of its own (the cache salt)."""

Successor = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to solve. `key` is unique within its environment, `data` is what the server gets."""

    key: str
    data: dict[str, Any]


class EnvSource:
    """Tasks and rollouts of `env.<name>`.

    `tasks` is a sequence, shuffled by the run's seed, or an endless iterator; see `endless`. Both give the
    same tasks in the same order every time. For an `evaluation` the order is that of the taskset and of its
    selection, and episodes are text only, so that any model will do. Raises ValueError on a bad environment
    configuration, an empty taskset, tasks of equal key, and (to train) a model without a known renderer.
    """

    def __init__(
        self,
        name: str,
        config: EnvConfig,
        run_config: RlConfig | EvalConfig,
        evaluation: bool = False,
        seed: int | None = None,
    ) -> None:
        """`seed` makes generated tasks; None = the run's."""
        self.name = name
        self.timeout = config.timeout
        self._client: EnvServerClient | None = None
        self._successor: Successor | None = None
        self._reviving: asyncio.Task[None] | None = None
        environment = environment_config(name, config, run_config.seed if seed is None else seed)
        taskset = _selected(name, vf.load_taskset(environment.taskset), config.select)
        self.endless = not taskset.bounded
        self.tasks: Sequence[Task] | Iterator[Task]
        self.tasks = map(_task, taskset) if self.endless else _finite(name, taskset)
        self._key: dict[str, Any] = {
            "api_key_var": getattr(run_config.inference, "api_key_var", "PRL_API_KEY")
        }
        if headers := getattr(run_config.inference, "headers", None):
            self._key["headers"] = headers
        self._renderer: dict[str, Any] = {}
        self._built: dict[Any, Any] = {}
        if isinstance(run_config, EvalConfig):
            self._key["headers"] = run_config.client.headers
        if evaluation:
            return
        if not self.endless:
            random.Random(run_config.seed).shuffle(self.tasks)
        self._renderer = {
            "renderer": renderer_config(run_config.model),
            "renderer_model_name": str(resolve_model_path(run_config.model)),
        }

    async def start(self, address: str, successor: Successor | None = None) -> None:
        """Connect to the environment server at `address`. Raises EnvServerDied if it does not answer.

        `successor()` waits for the address of the server that replaces this one when it died, and raises
        TimeoutError when none comes. Without it, the death of the server is the end.
        """
        self._successor = successor
        await self._connect(address)

    async def run(
        self,
        task: Task,
        *,
        group_id: str,
        base_url: str,
        model: str,
        sampling: dict[str, Any],
        train: bool,
        cache_salt: str | None,
        access: dict[str, Any] | None = None,
    ) -> Episode:
        """One episode of `task`, sampled from `model` at `base_url` (ending in /v1).

        `train` captures tokens and logprobs, through /inference/v1/generate; without it the episode is text
        only, through /v1/chat/completions, for endpoints that speak nothing else. `access` (`api_key_var`,
        `headers`) is for an endpoint other than the policy's. A fault of the rollout comes back as an error
        on its trace, `RolloutTimeout`, `EnvServerError` and (where a successor comes) `EnvServerDied`
        included. Cancelling the caller cancels the rollout in the server. Raises EnvServerDied when the
        server is gone for good, and ValueError if it ran another task.
        """
        client = await self._connection()
        common = {"env": self.name, "group_id": group_id, "task": task.data, "started_at": time.time()}
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        request = {
            "client": self._endpoint(base_url, train, access or self._key),
            "model": model,
            "sampling": self._once(vf.SamplingConfig, sampling | salt),
            "task_data": task.data,
        }
        try:
            wire = await client.run(request, self.timeout)
        except EnvServerDied as error:
            if self._successor is None:
                raise
            self._revive(client)
            return failed_episode(TraceError("EnvServerDied", str(error)), task_key=task.key, **common)
        except TimeoutError as error:
            return failed_episode(TraceError("RolloutTimeout", str(error)), task_key=task.key, **common)
        except RuntimeError as error:
            return failed_episode(TraceError("EnvServerError", str(error)), task_key=task.key, **common)
        if wire.task.key != task.key:
            raise ValueError(f"env.{self.name} was given task {task.key} and ran {wire.task.key}")
        return convert_episode(wire, text_only=not train, **common)

    def _endpoint(self, base_url: str, train: bool, access: dict[str, Any]) -> vf.BaseClientConfig:
        if train:
            return self._once(vf.TrainClientConfig, {"base_url": base_url, **access}, **self._renderer)
        return self._once(vf.EvalClientConfig, {"base_url": base_url, **access})

    def _once(self, kind: Callable[..., Any], fields: dict[str, Any], **fixed: Any) -> Any:
        """`kind(**fields, **fixed)`, the same object for equal `fields`: validation takes long."""
        key = (kind, repr(fields))
        if key not in self._built:
            if len(self._built) >= MOST_BUILT:
                self._built.clear()
            self._built[key] = kind(**fields, **fixed)
        return self._built[key]

    async def _connect(self, address: str) -> None:
        self._client = EnvServerClient(self.name, address)
        await self._client.wait_ready()

    async def _connection(self) -> EnvServerClient:
        """The live connection, once there is one again."""
        while self._reviving is not None:
            await asyncio.shield(self._reviving)
        assert self._client is not None, "start() comes first"
        return self._client

    def _revive(self, dead: EnvServerClient) -> None:
        """Look for the successor of a dead server, once; rollouts that start meanwhile wait for it."""
        if self._reviving is None and dead is self._client:
            log.warning("env/%s died; waiting for its successor", self.name)
            self._reviving = asyncio.create_task(self._follow(dead))

    async def _follow(self, dead: EnvServerClient) -> None:
        assert self._successor is not None
        await dead.close()
        while self._reviving is not None:
            try:
                address = await self._successor()
            except TimeoutError as error:
                raise EnvServerDied(f"env/{self.name} died and did not come back: {error}") from error
            try:
                await self._connect(address)
                self._reviving = None
            except EnvServerDied as error:  # it died before it answered; how often is the launcher's to say
                log.warning("%s; waiting for its successor", error)
                if self._client is not None:
                    await self._client.close()
        log.warning("env/%s is back at %s", self.name, address)

    async def close(self) -> None:
        """Disconnect; rollouts in flight are cancelled."""
        if self._reviving is not None:
            self._reviving.cancel()
            await asyncio.wait({self._reviving})
        if self._client is not None:
            await self._client.close()


def _task(task: vf.Task) -> Task:
    return Task(task.key, task.data.model_dump(mode="json"))


def _finite(name: str, taskset: vf.Taskset) -> list[Task]:
    tasks = [_task(task) for task in taskset]
    if not tasks:
        raise ValueError(f"env.{name}: no task is left of the taskset and its selection")
    if len({task.key for task in tasks}) < len(tasks):
        raise ValueError(f"env.{name}: tasks share a key; every task needs one of its own")
    return tasks


def _selected(name: str, taskset: vf.Taskset, select: SelectConfig) -> vf.Taskset:
    """The tasks that `env.<name>.select` keeps, in its order. Raises ValueError for what never ends."""
    given = {key: value for key, value in dataclasses.asdict(select).items() if value is not None}
    try:
        return taskset.select(vf.SelectConfig(**given))
    except ValueError as error:
        raise ValueError(f"env.{name}.select: {error}") from error
