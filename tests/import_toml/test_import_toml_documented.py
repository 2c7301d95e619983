"""Every documented field of the format: what it becomes, what its silence means, and that none is lost.

The table is `documented.txt`; its head says how it is read.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prl.assets import bundled_model
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.schema import GROUPS, JOBS
from prl.config.store import conf_dir
from prl.config.validate import Validator, leaf_paths
from prl.import_toml import common, rl, sft, sources
from prl.import_toml.main import translate
from prl.import_toml.translation import Translation
from prl.import_toml.write import _plant, overlay

TABLE = Path(__file__).parent / "documented.txt"
ENV = "reverse_text"
TASKSET = {"env": {"taskset": {"id": "reverse-text"}}}
OPEN = {"renderer", "env_vars", "extra_body", "vllm", "headers", "taskset", "agent", "roles", "columns"}
OPEN |= {"loss_mask", "kwargs"}
"""Tables whose keys are the user's, or are judged by the schema that they become part of."""


class Row(NamedTuple):
    """One documented field. `default`: (value, why prl's is another), or None where none is stated."""

    command: str
    context: tuple[str, ...]
    key: str
    sample: Any
    becomes: tuple[str, ...]
    default: tuple[Any, str] | None

    def __str__(self) -> str:
        return "; ".join([self.command, *self.context, self.key])


def read_table() -> list[Row]:
    rows: list[Row] = []
    command, context = "", ()
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            command, *rest = line[3:].split("; ")
            context = tuple(rest)
        elif line and not line.startswith("#"):
            given, _, rest = line.partition(" -> ")
            becomes, _, default = rest.partition(" | ")
            key, _, sample = given.partition(" = ")
            names = () if becomes == "none" else tuple(becomes.split())
            rows.append(
                Row(command, context, key, tomllib.loads(f"x = {sample}")["x"], names, parsed(default))
            )
    return rows


def parsed(default: str) -> tuple[Any, str] | None:
    if not default:
        return None
    value, end = json.JSONDecoder().raw_decode(default)
    return value, default[end:].strip(" ()")


ROWS = read_table()


def planted(table: dict[str, Any], command: str, key: str, value: Any) -> None:
    """Set a key of the table's notation in a parsed file."""
    parts = key.split(".")
    if parts[0] in ("source", "eval_source"):
        table = source(table, command, parts.pop(0))
    for part in parts[:-1]:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = table[part] = {}
        table = inner
    table[parts[-1]] = value


def source(table: dict[str, Any], command: str, kind: str) -> dict[str, Any]:
    """The first source of a file."""
    if kind == "source" and command == "eval":
        return table["source"][0]
    where = table.setdefault("eval", {}) if command == "sft" else table["orchestrator"]
    if command == "rl":
        where = where.setdefault("train" if kind == "source" else "eval", {})
    return where.setdefault("source", [json.loads(json.dumps(TASKSET))])[0]


def document(row: Row, with_key: bool, key: str | None = None) -> dict[str, Any]:
    """The file that a row speaks of: silent but for the context."""
    silent: dict[str, dict[str, Any]] = {
        "rl": {"orchestrator": {"train": {"source": [TASKSET]}}, "inference": {}},
        "sft": {"data": {}},
        "eval": {"source": [TASKSET]},
    }
    table = json.loads(json.dumps(silent[row.command]))
    for entry in row.context:
        if entry == "no inference":
            del table["inference"]
        else:
            name, _, value = entry.partition(" = ")
            planted(table, row.command, name, tomllib.loads(f"x = {value}")["x"])
    if row.key.startswith(("eval_source.", "orchestrator.eval.")):
        source(table, row.command, "eval_source")
    if with_key:
        planted(table, row.command, key or row.key, row.sample)
    return table


def meaning(notes: Translation) -> dict[str, Any]:
    """All that a translation says, by key or group, the environment's name as `<name>`."""
    found = {
        re.sub(rf"\b(env\.)(?:{ENV}|x)\b", r"\1<name>", key): value for key, value in notes.values.items()
    }
    choices = {re.sub(rf"\b(env\.){ENV}\b", r"\1<name>", key): value for key, value in notes.choices.items()}
    return found | choices


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_field_becomes_what_the_table_says_and_nothing_else(row: Row) -> None:
    silent = translate(row.command, document(row, with_key=False))
    said = translate(row.command, document(row, with_key=True))
    before, after = meaning(silent), meaning(said)
    changed = {key for key in before.keys() | after.keys() if before.get(key, ...) != after.get(key, ...)}
    if row.becomes == ("env.<name>.*",):  # its name is the key itself
        assert said.environments == ["x"] and silent.environments == [ENV] and changed == set()
        return
    assert changed == set(row.becomes)
    assert any(told(key, row.key) for key in [*said.without, *said.became]), [*said.without, *said.became]


def told(reported: str, key: str) -> bool:
    """Whether the import's report speaks of a key: of itself, of its table, or of what is in it."""
    of_source = re.sub(r"^.*?source\[0\]", "source", reported)
    key = re.sub(r"^eval_source\.|^orchestrator\.train\.(?=select)|^(?=env\.)", "source.", key)
    return key.startswith((reported, of_source)) or reported.startswith(key) or of_source.startswith(key)


@pytest.mark.parametrize("row", [row for row in ROWS if row.becomes], ids=str)
def test_a_neighbour_that_is_not_documented_is_refused(row: Row) -> None:
    table, _, name = row.key.rpartition(".")
    if OPEN & set(row.key.split(".")[:-1]) or name == "type":
        return
    try:
        notes = translate(row.command, document(row, with_key=True, key=f"{row.key}_zz"))
    except ConfigErrors as errors:
        assert any(f"{name}_zz" in problem.path for problem in errors.problems)
    else:
        pytest.fail(f"{table}.{name}_zz was taken: {notes.without}")


@pytest.mark.parametrize("row", [row for row in ROWS if row.becomes], ids=str)
def test_the_schema_takes_what_a_field_becomes(row: Row) -> None:
    notes = translate(row.command, document(row, with_key=True))
    tree: dict[str, Any] = {}
    for key, value in notes.values.items():
        _plant(tree, key.split("."), json.loads(json.dumps(value)))
    for group, option in notes.choices.items():
        table, _, place = group.partition("@")
        if table in GROUPS and option in GROUPS[table]:
            _plant(tree, [*(place or table).split("."), "name"], option)
    validator = Validator()
    validator.node(JOBS[row.command], tree, "")
    assert [str(problem) for problem in validator.problems if problem.reason != "missing"] == []


def counterparts() -> list[str]:
    return sorted({name for row in ROWS for name in row.becomes if name != "env.<name>.*"})


def test_every_counterpart_exists() -> None:
    paths = set(leaf_paths())
    tables = {path.rpartition(".")[0] for path in paths}
    tables |= {table.rpartition(".")[0] for table in tables}
    for name in counterparts():
        group = name.split("@")[0]
        if group in GROUPS or (conf_dir() / group).is_dir():
            continue
        plain = re.sub(r"^(?:eval\.)?env\.<name>\.(algo|curriculum)\.", r"\1.", name)
        plain = re.sub(r"^(curriculum\.(?:pools|gates))\.\w+", r"\1.<name>", plain)
        plain = plain.replace("val.data.", "data.")
        assert plain in paths or plain in tables or plain.rpartition(".")[0] in paths, name


@cache
def composed(command: str, context: tuple[str, ...], evaluates: bool, folder: Path) -> Any:
    """The config that a silent file with this context makes, with what only the machine knows."""
    key = "eval_source.group_size" if evaluates else "run.name"
    table = document(Row(command, context, key, None, (), None), with_key=False)
    notes = translate(command, table)
    name = f"silent_{abs(hash((command, context, evaluates)))}"
    target = folder / "experiment" / f"{name}.yaml"
    target.parent.mkdir(exist_ok=True)
    target.write_text(overlay(notes, "a silent file"))
    words = [f"experiment={name}"]
    if command == "eval":
        words.append("client.base_url=http://127.0.0.1:1/v1")
    else:
        words.append(f"model.path={bundled_model('tiny')}")
    if notes.choices["inference" if "inference" in notes.choices else "tracking"] == "vllm":
        words.append(f"inference.python={sys.executable}")
    if notes.choices.get("algo") in ("grpo", "max_rl", "opsd") and notes.values["rollout.group_size"] == 1:
        words.append("rollout.group_size=2")  # the format's own default earns nothing with them
    if notes.choices.get("algo") == "hierarchical_grpo":
        words += ["rollout.group_size=2", f"env.{ENV}.seats=[solver,other]"]
    if notes.choices.get("loss") == "custom":
        words.append("loss.import_path=os.path:join")
    return compose_job(command, words, [folder])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


def looked_up(config: Any, key: str) -> Any:
    for part in key.replace("<name>", ENV).split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return json.loads(json.dumps(config, default=vars))


@pytest.mark.parametrize("row", [row for row in ROWS if row.default], ids=str)
def test_silence_means_the_documented_default(
    row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRL_OUTPUT_DIR", raising=False)
    assert row.default is not None
    evaluates = row.key.startswith(("eval_source.", "orchestrator.eval."))
    config = composed(row.command, row.context, evaluates, folder)
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    key = next(key for key in row.becomes if "@" not in key and key not in groups)
    if key == "run.name":
        return  # made when it is null
    assert looked_up(config, key) == row.default[0]


def test_the_table_is_complete() -> None:
    """Whatever the import knows by name is in the table, for one component or for all."""
    listed = {"trainer.model": common.MODEL_WITHOUT, "trainer": rl.TRAINER_WITHOUT, "data": sft.DATA}
    listed |= {"orchestrator": rl.ORCHESTRATOR_WITHOUT, "inference": rl.INFERENCE_WITHOUT}
    listed |= {"slurm": {**rl.SLURM, **rl.SLURM_WITHOUT}, "eval": sft.EVAL_WITHOUT}
    listed |= {"": {**common.RUN, **common.RUN_WITHOUT, **common.LOG}, "source.env": sources.ENV_WITHOUT}
    listed |= {"source.serve": sources.SERVE_WITHOUT, "orchestrator.train.algo": sources.ALGO_KEYS}
    known = [row.key for row in ROWS] + [row.key.removeprefix("trainer.") for row in ROWS]
    known.append("orchestrator.train.algo.filter.kwargs")  # its row sets the whole filter
    names = [f"{table}.{key}".strip(".") for table, keys in listed.items() for key in keys]
    assert [name for name in names if not any(f"{key}.".startswith(f"{name}.") for key in known)] == []


def test_the_table_covers_each_command() -> None:
    counts = {command: sum(row.command == command for row in ROWS) for command in ("rl", "sft", "eval")}
    assert counts["rl"] > 200 and counts["sft"] > 50 and counts["eval"] > 20
    assert len({(row.command, row.context, row.key) for row in ROWS}) == len(ROWS), "a row is there twice"
