"""What a file cannot say: renamed keys, unknown ones, contradictions; and the pieces that find them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from prl.__main__ import main as prl
from prl.config.errors import ConfigErrors
from prl.import_toml.common import _positions, import_path
from prl.import_toml.main import detect, translate
from prl.import_toml.sources import environment_name, taskset_id
from prl.import_toml.tree import ABSENT, Tree, merged

RL = '[[orchestrator.train.source]]\nenv = {taskset = {id = "reverse-text"}}\n'
SFT = "[data]\n"
EVAL = '[[source]]\nenv = {taskset = {id = "x"}}\n'


def refused(command: str, text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        translate(command, tomllib.loads(text))
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("command", "text", "expected"),
    [
        (
            "rl",
            RL + "[orchestrator]\ngroup_size = 4\n",
            "orchestrator.group_size = 4: renamed. Now: orchestrator.train.group_size.",
        ),
        ("rl", RL + '[orchestrator.algo]\ntype = "opd"\n', "Now: orchestrator.train.algo.type."),
        ("rl", RL + '[orchestrator.teacher]\nname = "t"\n', "Now: orchestrator.train.algo.teacher.name."),
        ("rl", RL + "[orchestrator]\ntoken_batch_size = 4\n", "Now: orchestrator.batch_size."),
        ("rl", RL + '[trainer.loss]\ntype = "default"\n', "trainer.loss.type = default: renamed. Now: ipo"),
        ("rl", RL + "[trainer.loss]\nkl_tau = 0.1\n", "trainer.loss.kl_tau = 0.1: renamed."),
        ("rl", RL + '[wandb]\nproject = "x"\n', "Now: monitors.wandb.project."),
        ("rl", RL + "[orchestrator]\nenv_server_base_port = 5000\n", "renamed"),
        ("eval", EVAL + "num_examples = 5\n", "source[0].num_examples = 5: renamed. Now: select.limit."),
        ("eval", "max_concurrent = 5\n" + EVAL, "Now: concurrency."),
        ("rl", RL + "[trainer]\nmax_stesp = 4\n", "trainer.max_stesp = 4: unknown key."),
        ("rl", RL + "[trainer.optim]\nlearning_rate = 4\n", "trainer.optim.learning_rate = 4: unknown key."),
        (
            "rl",
            RL + '[trainer.optim]\ntype = "adam"\n',
            "trainer.optim.type = adam: no such variant. Nearest: adamw;",
        ),
        ("rl", RL + '[trainer.loss]\ntype = "dppo"\n', "no such variant. Nearest: ppo;"),
        (
            "rl",
            "[orchestrator]\nbatch_size = 4\n",
            "orchestrator.train.source = []: at least one source is needed.",
        ),
        (
            "rl",
            '[[orchestrator.train.source]]\nname = "x"\n',
            "source[0].env.taskset.id = null: no environment",
        ),
        ("rl", RL + RL, "source[1].name = reverse-text: given twice."),
        (
            "rl",
            RL + '[deployment]\ntype = "multi_node"\n',
            "multi_node needs num_train_nodes and a [slurm] table.",
        ),
        ("rl", RL + "[resume]\nstep = 5\ndir = 'a/step_5'\n", "step and dir exclude each other."),
        ("rl", RL + "[trainer.loss]\ntype = 'custom'\nimport_path = 'nothing'\n", "cannot be converted"),
        ("rl", RL + "[log]\nlevel = 'loud'\n", "log.level = loud: cannot be converted"),
        ("sft", SFT + "type = 'parquet'\n", "data.type = parquet: no such variant."),
        ("sft", SFT + "seqlen = 4\n", "data.seqlen = 4: unknown key. Nearest: seq_len;"),
        ("eval", EVAL + "[client]\nurl = 'x'\n", "client.url = x: unknown key."),
    ],
)
def test_each_fault_is_told_with_the_remedy(command: str, text: str, expected: str) -> None:
    messages = refused(command, text)
    assert len(messages) == 1, messages
    assert expected in messages[0]


def test_shared_keys_must_agree() -> None:
    (message,) = refused("rl", "max_steps = 5\n" + RL + "[trainer]\nmax_steps = 6\n")
    assert message == "trainer.max_steps = 6: max_steps says 5; both become max_steps in prl. State it once."
    notes = translate("rl", tomllib.loads("max_steps = 5\n" + RL + "[trainer]\nmax_steps = 5\n"))
    assert notes.values["max_steps"] == 5


def test_everything_wrong_is_told_at_once() -> None:
    text = RL + "[trainer]\nx = 1\n[trainer.optim]\ntype = 'adam'\n[orchestrator]\ngroup_size = 3\n"
    assert len(refused("rl", text)) == 3


def test_what_has_no_counterpart_is_listed_not_refused() -> None:
    text = RL + "[trainer.model]\nep = 8\n[orchestrator.model.client]\nbase_url = 'http://h/v1'\n"
    notes = translate("rl", tomllib.loads(text + "skip_model_check = true\n"))
    assert {"trainer.model.ep", "orchestrator.model.client.skip_model_check"} <= set(notes.without)


def test_the_tool_says_what_is_left_to_settle(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rl.toml").write_text('[model]\nname = "no/such-model"\n' + RL)
    assert prl(["import-toml", "rl.toml"]) == 2
    printed = capsys.readouterr()
    assert "to settle before it runs" in printed.err and "model" in printed.err
    assert "python -m prl rl --config-dir imported experiment=rl" in printed.out
    assert (
        Path("imported/experiment/rl.yaml").read_text().startswith("# @package _global_\n# rl: choose for ")
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "which file?"),
        (["absent.toml"], "No such file"),
        (["bad.toml"], "bad.toml"),
        (["odd.toml"], "neither an rl"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, monkeypatch, capsys, words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("a = = 1\n")
    Path("odd.toml").write_text("[server]\nport = 1\n")
    assert prl(["import-toml", *words]) == 2
    assert expected in capsys.readouterr().err
    assert not Path("imported").exists()


def test_a_tree_forgets_what_was_taken() -> None:
    tree = Tree({"a": {"b": {"c": 1, "d": "None"}}, "e": []})
    assert tree.take("a.b.c") == 1 and tree.take("a.b.c") is ABSENT
    assert tree.take("a.b.d", 5) is None and not tree.has("a")
    assert list(tree.leaves()) == [("e", [])]
    branch = Tree({"x": {"y": {"z": 2}}}).branch("x")
    assert list(branch.leaves()) == [("x.y.z", 2)] and branch.full("y") == "x.y"


def test_tables_merge_and_lists_do_not() -> None:
    assert merged({"a": {"b": 1, "c": [1]}}, {"a": {"c": [2]}, "d": 3}) == {"a": {"b": 1, "c": [2]}, "d": 3}


def test_names_paths_and_positions() -> None:
    assert (environment_name("owner/my-set@1"), taskset_id("reverse-text"), taskset_id("o/gsm-8k")) == (
        "my_set",
        "reverse_text",
        "o/gsm-8k",
    )
    assert (import_path("a.b.f"), import_path("a:f")) == ("a.b:f", "a:f")
    assert (_positions("1, 2:3"), _positions(4), _positions([5, "6:"])) == ([1, "2:3"], [4], [5, "6:"])
    assert [detect(table) for table in ({"trainer": {}}, {"source": []}, {"data": {}})] == [
        "rl",
        "eval",
        "sft",
    ]
