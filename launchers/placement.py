"""Config -> the table of roles: which processes a run has, in start order, on which devices.

Pure: nothing is started or written. The local supervisor executes the table, a dry run prints it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prl.config.env_vars import variables
from prl.config.rules_rl import sources
from prl.inference.roles import replicas
from prl.model_path import named_model

Kind = Literal["server", "job"]
Wants = Literal["engine", "trainer"] | None
"""Which kind of device a role is given, if any."""

COMMON_ENV = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Role:
    """One process. A `server` must live until the run is done; the run is done when every `job` ended well.

    `devices` are CUDA ids; none means that the process sees no GPU. A server with a `ready_timeout` must
    publish its address within so many seconds. One that dies is started again up to `restarts` times.
    `node` counts the machines of one job from 0.
    """

    name: str
    kind: Kind
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    ready_timeout: float | None = None
    restarts: int = 0
    node: int = 0

    @property
    def rank(self) -> int | None:
        """Rank among the trainer processes; None for every other role."""
        number = self.name.rpartition("/")[2]
        return int(number) if self.kind == "job" and number.isdigit() else None


def place(command: str, config: Any, resolved: Path, gpus: list[str]) -> list[Role]:
    """The roles of one run in start order. `gpus` are the CUDA ids that the run may use.

    Raises ValueError when there are GPUs, but fewer than trainer ranks.
    """
    parts = list(PARTS[command](config))
    devices = assign_devices([part.wants for part in parts], gpus, [part.gpus for part in parts])
    roles = [part.role(resolved, ids) for part, ids in zip(parts, devices, strict=True)]
    return with_variables(roles, config)


def with_variables(roles: Iterable[Role], config: Any) -> list[Role]:
    """`roles` with the user's environment variables, which win over prl's defaults."""
    return [replace(role, env={**role.env, **variables(config, role.name)}) for role in roles]


def visible_gpus(environ: Mapping[str, str], device_dir: Path = Path("/dev")) -> list[str]:
    """CUDA ids that this process may use: `CUDA_VISIBLE_DEVICES` as CUDA reads it, else every device file."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        found = [path.name.removeprefix("nvidia") for path in device_dir.glob("nvidia[0-9]*")]
        return [str(index) for index in range(len(found))]
    ids: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        if not entry or entry.startswith("-") or entry.lower() in ("none", "nodevfiles"):
            break  # CUDA ignores everything from the first invalid entry on
        ids.append(entry)
    return ids


def assign_devices(
    wants: list[Wants], gpus: list[str], sizes: list[int] | None = None
) -> list[tuple[str, ...]]:
    """Devices of each part: engines first, then trainers, `sizes` of them (one each); nothing for the rest.

    With fewer GPUs than engines + trainers want the engines share the trainers' GPUs.
    """
    sizes = sizes or [1] * len(wants)
    engines = sum(size for want, size in zip(wants, sizes, strict=True) if want == "engine")
    trainers = wants.count("trainer")
    if gpus and max(sizes, default=1) > len(gpus):
        raise ValueError(
            f"inference.tensor_parallel_size = {max(sizes)}: only {len(gpus)} GPUs are visible "
            f"({','.join(gpus)})."
        )
    if gpus and len(gpus) < trainers:
        raise ValueError(
            f"cluster.train_ranks = {trainers}: each trainer rank needs its own GPU, only {len(gpus)} are "
            f"visible ({','.join(gpus)}). Lower it, or set CUDA_VISIBLE_DEVICES= to run on CPUs."
        )
    shared = len(gpus) < engines + trainers
    taken = {"engine": 0, "trainer": 0 if shared else engines}
    devices: list[tuple[str, ...]] = []
    for want, size in zip(wants, sizes, strict=True):
        if want is None or not gpus:
            devices.append(())
            continue
        first = taken[want]
        devices.append(tuple(gpus[(first + offset) % len(gpus)] for offset in range(size)))
        taken[want] += size
    return devices


@dataclass(frozen=True)
class Part:
    """A role before it has devices and a config file."""

    name: str
    kind: Kind
    env: dict[str, str] = field(default_factory=dict)
    wants: Wants = None
    ready_timeout: float | None = None
    restarts: int = 0
    gpus: int = 1
    """Devices that it wants, where it wants any."""
    python: str | None = None
    """Interpreter of another environment."""

    def role(self, resolved: Path, devices: tuple[str, ...]) -> Role:
        argv = (self.python or sys.executable, "-m", "launchers.role", self.name, str(resolved))
        env = {**COMMON_ENV, **self.env, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        return Role(self.name, self.kind, argv, env, devices, self.ready_timeout, self.restarts)


def _rl_parts(config: Any) -> Iterator[Part]:
    offline = _offline(config.model.path)
    yield from engine_parts(config)
    for key, endpoint in served_teachers(config).items():
        yield _engine(f"teacher/{key}", config, _offline(named_model(endpoint.model).path))
    yield from env_parts("env", config.env, config)
    yield from env_parts("env/eval", config.eval.env, config)
    yield Part("orchestrator", "job")
    yield from _ranks("trainer", config, offline)


def _sft_parts(config: Any) -> Iterator[Part]:
    if config.eval.env:
        yield from engine_parts(config)
        yield from env_parts("env/eval", config.eval.env, config)
        yield Part("evals", "job")
    yield from _ranks("sft", config, _offline(config.model.path))


def _eval_parts(config: Any) -> Iterator[Part]:
    yield from engine_parts(config)
    yield from env_parts("env", config.env, config, restarts=False)
    yield Part("eval", "job")


def engine_parts(config: Any) -> Iterator[Part]:
    """The engines of the policy, `inference` or, behind a router of that name, `inference/<replica>`."""
    if config.inference.name == "external":
        return
    env, count = _offline(config.model.path), replicas(config)
    if count == 1:
        yield _engine("inference", config, env)
        return
    for replica in range(count):
        yield _engine(f"inference/{replica}", config, env)
    yield Part("inference", "server", env, ready_timeout=2 * config.inference.ready_timeout)


def _engine(name: str, config: Any, env: dict[str, str]) -> Part:
    engine = config.inference
    env = {**env, "OMP_NUM_THREADS": str(getattr(engine, "threads", 1))}
    python = getattr(engine, "python", None)
    if python is not None:  # the other environment has vLLM, and prl from where it runs now
        here = str(Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    size = getattr(engine, "tensor_parallel_size", 1)
    return Part(name, "server", env, "engine", engine.ready_timeout, gpus=size, python=python)


PARTS = {"rl": _rl_parts, "sft": _sft_parts, "eval": _eval_parts, "inference": engine_parts}
"""Command -> the parts of its run."""


def env_parts(prefix: str, envs: Mapping[str, Any], config: Any, restarts: bool = True) -> Iterator[Part]:
    """An environment server each; `env/eval` is the prefix of those to evaluate on while training."""
    for name, env in envs.items():
        again = env.restarts if restarts else 0
        yield Part(f"{prefix}/{name}", "server", ready_timeout=config.cluster.start_timeout, restarts=again)


def _ranks(prefix: str, config: Any, env: dict[str, str]) -> Iterator[Part]:
    threads = {"OMP_NUM_THREADS": str(config.trainer.threads)}
    for rank in range(config.cluster.train_ranks):
        yield Part(f"{prefix}/{rank}", "job", env | threads, "trainer")


def served_teachers(config: Any) -> dict[str, Any]:
    """Endpoints of the frozen teachers that prl itself serves.

    Key: the environment whose own algorithm needs the teacher, or `shared` for the run's algorithm.
    """
    teachers = {}
    for source in sources(config):
        endpoint = getattr(source.algo, "teacher", None)
        if endpoint is not None and endpoint.base_url is None:
            teachers["shared" if source.algo_path == "algo" else source.env] = endpoint
    return teachers


def _offline(model_path: str | None) -> dict[str, str]:
    """No look at the hub for weights that are bundled or lie on disk."""
    local = model_path is None or Path(model_path).expanduser().exists()
    return {"HF_HUB_OFFLINE": "1"} if local else {}


def format_table(roles: Iterable[Role]) -> str:
    """The placement as aligned text: role, kind, devices and what is special in its environment.

    With several nodes a column tells the node of each role.
    """
    roles = list(roles)
    head = ["role", "kind", "devices", "environment"]
    rows = [[role.name, role.kind, ",".join(role.devices) or "cpu", _special(role)] for role in roles]
    if any(role.node for role in roles):
        head.insert(0, "node")
        rows = [[str(role.node), *row] for role, row in zip(roles, rows, strict=True)]
    rows.insert(0, head)
    widths = [max(len(row[column]) for row in rows) for column in range(len(head) - 1)]
    lines = (
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _special(role: Role) -> str:
    own = {key: value for key, value in role.env.items() if COMMON_ENV.get(key) != value}
    own.pop("CUDA_VISIBLE_DEVICES", None)
    return " ".join(f"{key}={value}" for key, value in sorted(own.items()))
