"""Config -> the table of roles: which processes a run has, in start order, on which devices.

Pure: nothing is started or written. The local supervisor executes the table, a dry run prints it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from prl.config.rules_rl import sources
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
    publish its address within so many seconds.
    """

    name: str
    kind: Kind
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    ready_timeout: float | None = None


def place(command: str, config: Any, resolved: Path, gpus: list[str]) -> list[Role]:
    """The roles of one run in start order. `gpus` are the CUDA ids that the run may use.

    Raises ValueError when there are GPUs, but fewer than trainer ranks.
    """
    parts = list(PARTS[command](config))
    devices = assign_devices([part.wants for part in parts], gpus)
    return [part.role(resolved, ids) for part, ids in zip(parts, devices, strict=True)]


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


def assign_devices(wants: list[Wants], gpus: list[str]) -> list[tuple[str, ...]]:
    """Devices of each part: engines first, then trainers, one each; nothing for the rest.

    With fewer GPUs than engines + trainers the engines share the trainers' GPUs.
    """
    engines, trainers = wants.count("engine"), wants.count("trainer")
    if gpus and len(gpus) < trainers:
        raise ValueError(
            f"cluster.train_ranks = {trainers}: each trainer rank needs its own GPU, only {len(gpus)} are "
            f"visible ({','.join(gpus)}). Lower it, or set CUDA_VISIBLE_DEVICES= to run on CPUs."
        )
    shared = len(gpus) < engines + trainers
    taken = {"engine": 0, "trainer": 0 if shared else engines}
    devices: list[tuple[str, ...]] = []
    for want in wants:
        if want is None or not gpus:
            devices.append(())
            continue
        devices.append((gpus[taken[want] % len(gpus)],))
        taken[want] += 1
    return devices


@dataclass(frozen=True)
class _Part:
    """A role before it has devices and a config file."""

    name: str
    kind: Kind
    env: dict[str, str] = field(default_factory=dict)
    wants: Wants = None
    ready_timeout: float | None = None

    def role(self, resolved: Path, devices: tuple[str, ...]) -> Role:
        argv = (sys.executable, "-m", "launchers.role", self.name, str(resolved))
        env = {**COMMON_ENV, **self.env, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        return Role(self.name, self.kind, argv, env, devices, self.ready_timeout)


def _rl_parts(config: Any) -> Iterator[_Part]:
    offline = _offline(config.model.path)
    ready = config.inference.ready_timeout
    threads = {"OMP_NUM_THREADS": str(getattr(config.inference, "threads", 1))}
    if config.inference.name != "external":
        yield _Part("inference", "server", offline | threads, "engine", ready)
    for key, endpoint in served_teachers(config).items():
        yield _Part(
            f"teacher/{key}", "server", _offline(named_model(endpoint.model).path) | threads, "engine", ready
        )
    for name in config.env:
        yield _Part(f"env/{name}", "server", ready_timeout=config.cluster.start_timeout)
    yield _Part("orchestrator", "job")
    yield from _ranks("trainer", config, offline)


def _sft_parts(config: Any) -> Iterator[_Part]:
    yield from _ranks("sft", config, _offline(config.model.path))


def _eval_parts(config: Any) -> Iterator[_Part]:
    if config.inference.name != "external":
        threads = {"OMP_NUM_THREADS": str(getattr(config.inference, "threads", 1))}
        env = _offline(config.model.path) | threads
        yield _Part("inference", "server", env, "engine", config.inference.ready_timeout)
    for name in config.env:
        yield _Part(f"env/{name}", "server", ready_timeout=config.cluster.start_timeout)
    yield _Part("eval", "job")


PARTS = {"rl": _rl_parts, "sft": _sft_parts, "eval": _eval_parts}
"""Command -> the parts of its run."""


def _ranks(prefix: str, config: Any, env: dict[str, str]) -> Iterator[_Part]:
    threads = {"OMP_NUM_THREADS": str(config.trainer.threads)}
    for rank in range(config.cluster.train_ranks):
        yield _Part(f"{prefix}/{rank}", "job", env | threads, "trainer")


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
    """The placement as aligned text: role, kind, devices and what is special in its environment."""
    rows = [("role", "kind", "devices", "environment")]
    for role in roles:
        own = {key: value for key, value in role.env.items() if COMMON_ENV.get(key) != value}
        own.pop("CUDA_VISIBLE_DEVICES", None)
        settings = " ".join(f"{key}={value}" for key, value in sorted(own.items()))
        rows.append((role.name, role.kind, ",".join(role.devices) or "cpu", settings))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = (
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
