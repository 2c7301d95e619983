"""`env.<name>` -> verifiers' environment configuration, with defaults that work on a bare machine."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, taskset_config_type

from prl.config.errors import suggest
from prl.config.sources import EnvConfig
from prl.env.inprocess_chat import HARNESS_ID
from prl.env.plugins import register_harness, register_taskset


def environment_config(name: str, config: EnvConfig, seed: int) -> vf.EnvConfig:
    """What verifiers runs for `env.<name>`; `seed` goes to tasksets that have one and are given none.

    Every seat defaults to the in-process chat harness in a subprocess runtime, unless the environment's
    author pinned others. Raises ValueError with the path of what is wrong.
    """
    taskset_id = config.id or name
    register_harness()
    register_taskset(taskset_id)
    fields = env_config_type(taskset_id).model_fields
    seats = {
        name: field.default for name, field in fields.items() if isinstance(field.default, vf.AgentConfig)
    }
    _check_options(name, config.agents, set(fields) - {"id", "taskset"}, set(seats))
    if config.seats is not None and set(config.seats) != set(seats):
        raise ValueError(f"env.{name}.seats={config.seats}, but its agents are {', '.join(sorted(seats))}")
    data = {"taskset": _taskset(name, taskset_id, config.taskset, seed), **config.agents}
    for seat, default in seats.items():
        data[seat] = _seat(default, config.agents.get(seat) or {}, default_harness_id(taskset_id))
    try:
        return vf.resolve_env_config(data)
    except ValidationError as error:
        raise ValueError(f"env.{name}: {_wording(error)}") from error


def _check_options(name: str, given: dict[str, Any], known: set[str], seats: set[str]) -> None:
    if unknown := set(given) - known:
        raise ValueError(
            f"env.{name}.agents has no {', '.join(sorted(unknown))}; seats of this environment: "
            f"{', '.join(sorted(seats))}; other options: {', '.join(sorted(known - seats))}"
        )


def _taskset(name: str, taskset_id: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    known = taskset_config_type(taskset_id)
    if known.model_config.get("extra") == "forbid":
        for unknown in options.keys() - known.model_fields.keys():
            raise ValueError(
                f"env.{name}.taskset.{unknown} = {options[unknown]}: no such option of this taskset. "
                f"{suggest(unknown, sorted(known.model_fields.keys() - {'id'}))}"
            )
    seeded = "seed" in known.model_fields
    return {**({"seed": seed} if seeded else {}), **options, "id": taskset_id}


def _seat(default: vf.AgentConfig, options: dict[str, Any], taskset_harness: str) -> dict[str, Any]:
    seat = dict(options)
    if isinstance(seat.get("harness"), str):
        seat["harness"] = {"id": seat["harness"]}
    if default.harness is None and taskset_harness == "bash":
        seat["harness"] = {"id": HARNESS_ID, **(seat.get("harness") or {})}
    if "runtime" not in default.model_fields_set:
        seat["runtime"] = {"type": "subprocess", **(seat.get("runtime") or {})}
    return seat


def _wording(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'configuration'}: {item['msg']}" for item in error.errors()
    )
