"""The reference page is what the schema and the option files say."""

from __future__ import annotations

from prl.config import reference
from prl.config.schema import GROUPS, JOBS
from prl.config.store import conf_dir
from prl.config.validate import leaf_paths


def test_the_page_is_current() -> None:
    page = conf_dir() / "README.md"
    assert page.read_text() == reference.markdown(), "run: python -m prl.config.reference > conf/README.md"


def test_every_key_is_on_the_page_with_its_meaning() -> None:
    page = reference.markdown()
    leaves = [path for path in leaf_paths() if path.rpartition(".")[2] != "name" and path not in GROUPS]
    assert [path for path in leaves if f"| `{path}` |" not in page] == []
    keys = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") >= 5]
    assert [line for line in keys if line.replace("\\|", "").split("|")[4].strip() == ""] == []


def test_groups_follow_the_defaults_list_and_mark_the_choice() -> None:
    found = reference.groups("rl")
    assert list(found)[:4] == ["algo", "loss", "model", "env"]
    assert {o.name for o in found["loss"] if o.chosen} == {"ipo"}
    assert {o.name for o in found["env"] if o.chosen} == {"reverse_text"}
    assert "tiny_warm_start" not in {o.name for o in found.get("experiment", [])}
    assert "tiny_warm_start" in {o.name for o in reference.groups("sft")["experiment"]}


def test_keys_have_type_default_and_bounds() -> None:
    keys = {entry.path: entry for entry in reference.fields("rl")}
    assert (keys["rollout.batch_size"].kind, keys["rollout.batch_size"].default) == ("int ≥ 1", "128")
    assert keys["model.name"].default == "required"
    assert keys["max_steps"].kind == "int ≥ 1 | null"
    assert keys["zero.stage"].kind == "0 | 1 | 2 | 3"
    own = reference.option_fields("optim")
    assert [entry.path for entry in own[""]] == ["optim.lr", "optim.weight_decay", "optim.max_norm"]
    assert [entry.path for entry in own["sgd"]] == ["optim.momentum", "optim.nesterov"]


def test_help_has_a_summary_for_every_command() -> None:
    for command in JOBS:
        assert reference.help_text(command, list(JOBS)).startswith(
            f"prl {command}: {reference.summary(command)}"
        )


def test_own_options_are_listed(tmp_path) -> None:
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "mine.yaml").write_text("# Choose mine.\nname: mine\n")
    assert "mine" in {o.name for o in reference.groups("rl", [tmp_path])["algo"]}
