"""What an impatient user types: odd words on every command, and the one message that each gets."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from prl.__main__ import main as prl

CHOICES = [
    ("rl env=[reverse_text,reverse_text]", "env = [reverse_text,reverse_text]: reverse_text is named twice."),
    ("rl eval.env=[arithmetic,arithmetic]", "eval.env = [arithmetic,arithmetic]: arithmetic is named twice."),
    ("rl ~env", "env = null: a list of environments is needed. Valid: alphabet_sort"),
    ("rl algo=[grpo,rae]", "algo = [grpo,rae]: one choice is needed. Write algo=<option>;"),
    ("rl algo=[]", "algo = []: one choice is needed."),
    ("rl algo.name=rae", "algo.name = rae: an option is chosen as a whole. Write algo=rae."),
    ("rl +algo=rae", "algo = rae: a run has one of this group already. Write algo=rae."),
    ("rl ~algo=rae", "algo: it is not chosen, so it cannot be removed."),
    ("rl algo.import_path=mine:Own", "algo.import_path = mine:Own: algo=grpo is prl's own. Put name"),
    ("rl recipe/sft=tiny", "recipe/sft = tiny: `prl rl` has no such choice."),
    ("rl loss@algo=ipo", "loss@algo = ipo: there is no such place. Write loss=ipo."),
    ("rl algo@env.a=opd", "algo@env.a = opd: there is no such place. Write algo@env.<name>.algo=opd."),
    ("sft algo=opd", "algo = opd: `prl sft` has no such choice."),
    ("sft env=[reverse_text]", "env = [reverse_text]: `prl sft` has no such choice."),
    ("sft data@val=rows", "data@val = rows: there is no such place. Write data@val.data=rows."),
    ("sft data@val.dat=rows", "Write data@val.data=rows."),
    ("eval algo=opd", "algo = opd: `prl eval` has no such choice. Valid: cluster, debug, env"),
    ("eval reverse_text reverse_text", "reverse_text is named twice. Name it once."),
    ("inference env=[reverse_text]", "env = [reverse_text]: `prl inference` has no such choice."),
    ("export run=. experiment=x", "experiment = x: `prl export` has no such choice. Valid: cluster."),
    ("export run=. env=[reverse_text]", "env = [reverse_text]: `prl export` has no such choice."),
]

VALUES = [
    ("rl env.reverse_text.select.include.idx=[-1]", "idx = -1: neither a position nor a slice."),
    ("rl env.reverse_text.select.include.idx=[a]", "idx = a: neither a position nor a slice."),
    ("rl env.reverse_text.select.include.idx=5", "a list [a value, ...] is needed, this is an integer."),
    ("rl eval.select.exclude.idx=[x]", "eval.select.exclude.idx = x: neither a position nor a slice."),
    ("rl env.reverse_text.id=", "env.reverse_text.id = : a taskset is needed. Leave it out"),
    ("rl env.reverse_text.seats=[]", "seats = []: different names of its agents are needed."),
    ("rl env.reverse_text.seats=[a,a]", "different names of its agents are needed."),
    ("rl run.resume=0", "run.resume = 0: steps count from 1."),
    ("rl output_dir=/dev/null", "output_dir = /dev/null: /dev/null is a file."),
    ("rl output_dir=/dev/null/x/y", "output_dir = /dev/null/x/y: /dev/null is a file."),
    ("rl output_dir=null", "output_dir = null: text is needed. Set output_dir=...: Parent of all runs."),
    ("rl model.path=''", "model.path = : no model there"),
    ("sft data=rows data.path=", "data.path = : a file, a folder or a name is needed."),
    ("eval reverse_text optim.lr=5", "optim = {'lr': 5}: unknown key. Valid: env, model, steps"),
    ("eval reverse_text steps=5", "steps = 5: a list [a value, ...] is needed, this is an integer."),
    (
        "eval reverse_text inference=external",
        "inference.base_url = null: text is needed. Set",
    ),
    ("export run=", "run = : a directory is needed."),
    ("export run=. out=", "out = : a directory is needed."),
    ("rl hydra.run.dir=/tmp/x", "hydra.run.dir = /tmp/x: prl makes a run's directory itself"),
    ("rl hydra.job.chdir=true", "Set output_dir and run.name."),
    ("rl hydra.foo=1", "hydra.foo: Hydra has no such key."),
    ("rl --multirun hydra.sweep.dir= seed=1,2", "hydra.sweep.dir = : a directory is needed."),
]

WORDS = [
    ("=5", "=5: a key is needed before `=`."),
    ("=", "=: a key is needed before `=`."),
    ("optim.lr 3e-4", "optim.lr: neither a command nor of the form key=value. Write optim.lr=3e-4, without"),
    ("max_steps = 5", "max_steps: neither a command nor of the form key=value. Write max_steps=5,"),
    ("max_steps: 5", "Write max_steps=5, without spaces."),
    ("rl 'algo=opd loss=ipo'", "algo=opd loss=ipo: several words in one. Write algo=opd loss=ipo."),
    ("rl 'algo=opd;loss=ipo'", "several words in one. Write algo=opd loss=ipo."),
    ("rl sft", "sft: the command is the first word, and there is one. Write prl sft ..., flags"),
    ("--multirun export run=.", "export: the command is the first word, and there is one. Write prl export"),
    ("bench", "bench: a second word is needed. Valid: ckpt, config"),
    ("bench trainr", "bench = trainr: a second word is needed. Nearest: trainer;"),
    ("dashbord", "command = dashbord: no such command. Nearest: dashboard;"),
    ("--dry-run=5", "--dry-run = 5: it takes no value."),
    ("--multirun=yes seed=1,2", "--multirun = yes: it takes no value."),
    ("--cfg jobb", "--cfg = jobb: nothing that can be shown. Nearest: job; valid: all, hydra, job."),
    ("--resolve", "--resolve: goes with --cfg. Write --cfg job --resolve."),
    ("--package env", "--package: goes with --cfg."),
    ("--config-name sft", "--config-name = sft: made for `prl sft`. Write prl sft."),
    ("--multirun algo=glob(x*)", "--multirun: no option matches, so there is nothing to run."),
    ("hydra.searchpath=[/nope]", "hydra.searchpath = /nope: no such directory."),
    ("hydra.searchpath=[file:///nope]", "hydra.searchpath = file:///nope: no such directory."),
    ("hydra.searchpath=[pkg://nope]", "hydra.searchpath = pkg://nope: no such package."),
    (
        "hydra.searchpath=/tmp",
        "hydra.searchpath = /tmp: a list of places is needed. Write",
    ),
]

FILES = {
    "algo/broken.yaml": b"a: [1\n",
    "experiment/tab.yaml": b"# @package _global_\noptim:\n\tlr: 1\n",
    "experiment/here.yaml": b"optim:\n  lr: 1\n",
    "experiment/twice.yaml": b"# @package _global_\ndefaults:\n  - /algo: echo\n",
}

OWN_FILES = [
    ("algo=broken", "algo/broken.yaml, line 2: not YAML: expected ',' or ']', but got '<stream end>'."),
    ("experiment=tab", "experiment/tab.yaml, line 3: not YAML: found character '\\t' that cannot start"),
    ("experiment=here", "unknown key. The first line of the option's file must be `# @package _global_`."),
    (
        "experiment=twice",
        "algo: chosen twice. Write algo=echo on the command line, `override",
    ),
]


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed when `words` are refused, in one line, with nothing written."""
    assert prl(words) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err
    assert len(printed.err.strip().splitlines()) == 1, printed.err
    return printed.err


@pytest.mark.parametrize(("line", "expected"), [*CHOICES, *VALUES, *WORDS])
def test_an_odd_word_gets_one_message(
    line: str, expected: str, clean_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in told(shlex.split(line), capsys)
    assert list(clean_place.iterdir()) == []


@pytest.mark.parametrize(("word", "expected"), OWN_FILES)
def test_faults_in_files_of_the_users_own(
    word: str, expected: str, clean_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in FILES.items():
        (clean_place / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (clean_place / "mine" / name).write_bytes(content)
    assert expected in told(["--config-dir", "mine", word], capsys)


def test_a_file_that_is_no_text(clean_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clean_place / "mine" / "experiment").mkdir(parents=True)
    (clean_place / "mine" / "experiment" / "latin.yaml").write_bytes(b"# na\xefve\n")
    expected = "experiment/latin.yaml: not UTF-8 text. Save it as UTF-8."
    assert expected in told(["--config-dir", "mine", "experiment=latin"], capsys)


def test_all_bad_elements_of_a_sweep_are_told_before_the_first_starts(
    clean_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prl(["--multirun", "optim.lr=1e-4,x,-1", "algo=opd,gpro"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["algo = gpro", "optim.lr = x", "optim.lr = -1.0"]
    assert list(clean_place.iterdir()) == []


def test_the_flag_that_starts_nothing_wins(clean_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prl(["--dry-run", "dry_run=false"]) == 0
    assert "placement" in capsys.readouterr().out and list(clean_place.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["+env=[arithmetic]"], ["reverse_text", "arithmetic"]),
        (["env=arithmetic"], ["arithmetic"]),
        (["+env.other.id=reverse_text"], ["reverse_text", "other"]),
    ],
)
def test_environments_are_added_and_replaced(rl, words: list[str], chosen: list[str]) -> None:
    assert list(rl(*words).env) == chosen


def test_a_taskset_that_is_not_found_is_told_before_the_run(rl, caplog: pytest.LogCaptureFixture) -> None:
    rl("env.reverse_text.id=nope_set")
    assert "env.reverse_text.id = nope_set: no such environment or taskset" in caplog.text
    caplog.clear()
    rl()
    assert caplog.text == ""


def test_one_environment_to_evaluate_on_needs_no_brackets(rl) -> None:
    assert list(rl("eval.env=arithmetic").eval.env) == ["arithmetic"]


def test_a_choice_may_be_a_list_of_one(rl) -> None:
    assert rl("algo=[rae]").algo.name == "rae"
