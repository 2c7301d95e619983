"""The role `env/<name>`: one verifiers environment server, with as many workers as the configuration asks."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from prl.config.schema import EvalConfig, RlConfig
from prl.config.sources import EnvConfig
from prl.run_dir import RunDir

logger = logging.getLogger(__name__)

STOPPED = (0, -signal.SIGTERM)
"""Exit codes of a worker that was told to stop."""


def main(config: RlConfig | EvalConfig, run: RunDir, role: str) -> None:
    """Serve `env.<name>` until SIGTERM; then return. Exits with 1 if a worker dies.

    The address is published once the server's socket is bound and, in a server of one worker, the renderer
    is built.
    """
    signal.signal(signal.SIGTERM, _quit)
    gc.disable()  # the import allocates for seconds and frees next to nothing
    from verifiers.v1.serve import env_config_data, serve_env

    from prl.env.environment import environment_config
    from prl.env.worker import prepare

    gc.enable()
    name = role.removeprefix("env/")
    env, seed = served_environment(config, name)
    environment = environment_config(name.removeprefix("eval/"), env, seed)
    model = config.model if isinstance(config, RlConfig) and not name.startswith("eval/") else None
    watch = _WorkerWatch(env.workers)
    setup = functools.partial(prepare, environment.taskset.id, model, config.log, role, env.workers)
    with contextlib.suppress(KeyboardInterrupt):  # how `serve_env` says SIGTERM while it still starts up
        serve_env(
            max_workers=env.workers,
            elastic=env.elastic,
            multiplex=env.multiplex,
            address="tcp://127.0.0.1:0",
            address_queue=_Publication(run, role),
            config_data=env_config_data(environment),
            log_setup=setup,
        )
    if watch.dead:
        sys.exit(f"env/{name}: a worker died: {watch.dead}")


def served_environment(config: Any, name: str) -> tuple[EnvConfig, int]:
    """(`env.<name>`, or `eval.env.<x>` for the name `eval/<x>`, the seed of its tasks)."""
    if name.startswith("eval/"):
        return config.eval.env[name.removeprefix("eval/")], eval_seed(config)
    return config.env[name], config.seed


def eval_seed(config: Any) -> int:
    """Seed of the tasks of evaluations while training: not the one that training draws from."""
    return config.seed + 1 if config.eval.seed is None else config.eval.seed


class _Publication:
    """What `serve_env` takes for a queue: it is given the bound address, once."""

    def __init__(self, run: RunDir, role: str) -> None:
        self.run, self.role = run, role

    def put(self, address: str) -> None:
        self.run.publish_address(self.role, address)
        logger.info("%s listens at %s", self.role, address)


class _WorkerWatch:
    """Stops the server when one of its worker processes dies: its rollouts would wait for ever."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.dead = ""
        if workers > 1:
            threading.Thread(target=self._run, name="worker-watch", daemon=True).start()

    def _run(self) -> None:
        workers: set[Any] = set()
        while not self.dead:
            time.sleep(0.5)
            workers.update(multiprocessing.active_children())
            codes = {worker.name: worker.exitcode for worker in workers}
            fallen = {name: code for name, code in codes.items() if code is not None and code not in STOPPED}
            self.dead = ", ".join(f"{name} (exit code {code})" for name, code in fallen.items())
        os.kill(os.getpid(), signal.SIGTERM)


def _quit(*_: object) -> NoReturn:
    sys.exit(0)
