"""Bad input, one by one: what was typed, and every word that the single message must contain."""

from __future__ import annotations

import pytest

ALGOS = "echo, grpo, hierarchical_grpo, max_rl, opd, opsd, rae, sft"

NAMES = [
    ("algo=gpro", "algo = gpro: no such option. Nearest: grpo; valid: " + ALGOS),
    ("loss=dppo", "loss = dppo: no such option. Nearest: ppo;"),
    ("optim=adam", "optim = adam: no such option. Nearest: adamw; valid: adamw, muon, sgd, sign_sgd."),
    ("zero=4", "zero = 4: no such option. Valid: 0, 1, 2, 3."),
    ("zero=two", "zero = two: no such option."),
    ("env=[revers_text]", "env = revers_text: no such option. Nearest: reverse_text;"),
    ("env=null", "env = null: a list of environments is needed."),
    ("model=null", "model = null: a choice is needed. Valid: tiny"),
    ("+experiment=nope", "experiment = nope: no such option."),
    ("experiment=tiny_warm_start", "experiment = tiny_warm_start: made for `prl sft`, not for `prl rl`."),
    ("algos@env.reverse_text.algo=echo", "algos: no such group. Nearest: algo;"),
    ("algo@env.reverse_text.algo=echo", "use +algo@env.reverse_text.algo=echo"),
    ("+algo@env.reverse_text.algo=ecco", "algo = ecco: no such option. Nearest: echo;"),
    ("~algo", "algo: missing. Choose one: algo=<option>; valid: grpo"),
    (
        "env.reverse_txt.ratio=2",
        "env.reverse_txt.ratio = 2: this environment was not chosen. Nearest: reverse_text;",
    ),
    ("env.arithmetic.ratio=2", "not chosen. Choose it by env=[reverse_text,arithmetic]."),
]

KEYS = [
    ("algos=grpo", "algos = grpo: unknown key. Nearest: algo;"),
    ("hydra.sweeper.params={seed: '1,2'}", "Hydra takes it from a file only. Write the values as words"),
    ("env.reverse_text.algo=ecco", "algo = ecco: no such option. Nearest: echo;"),
    ("env.reverse_text.algo=[echo]", "Write env.reverse_text.algo=<option>; valid: grpo"),
    ("optim.lrr=1", "optim.lrr = 1: unknown key of optim=adamw. Nearest: optim.lr;"),
    ("+optim.lrr=1", "optim.lrr = 1: unknown key of optim=adamw. Nearest: optim.lr;"),
    ("++foo=1", "foo = 1: unknown key. Valid: algo, loss, model"),
    ("+foo.bar=1", "foo = {'bar': 1}: unknown key."),
    ("lr=1e-4", "lr = 1e-4: unknown key. Nearest: optim.lr."),
    (
        "group_size=4",
        "group_size = 4: unknown key. Nearest: rollout.group_size, eval.group_size, env.<name>.",
    ),
    ("loss.ratio_low=0.1", "unknown key of loss=ipo. It belongs to loss=icepop, loss=ppo, loss=cispo;"),
    ("rollout.sampling.temp=1", "Nearest: rollout.sampling.temperature;"),
    ("env.reverse_text.rato=2", "unknown key of env.reverse_text. Nearest: env.reverse_text.ratio;"),
    ("+env.b.ids=x", "env.b.ids = x: unknown key of env.b. Nearest: env.b.id;"),
    ("run.nam=x", "run.nam = x: unknown key of run. Nearest: run.name;"),
]

VALUES = [
    ("optim.lr=-1", "optim.lr = -1: must be at least 0."),
    ("optim.lr=nan", "optim.lr = nan: must be finite."),
    ("optim.lr=inf", "optim.lr = inf: must be finite."),
    ("optim.lr=fast", "optim.lr = fast: a number is needed, this is text."),
    ("optim.lr=null", "optim.lr = null: a number is needed."),
    ("optim.lr=true", "optim.lr = true: a number is needed, this is true or false."),
    ("optim.betas=[0.9,b]", "optim.betas[1] = b: a number is needed, this is text."),
    ("optim.betas=[0.9,1]", "optim.betas = 1.0: must be less than 1. Valid: at least 0 and less than 1."),
    ("optim.betas=0.9", "optim.betas = 0.9: a list [a number, ...] is needed, this is a number."),
    ("optim.max_norm=0", "optim.max_norm = 0: must be more than 0."),
    ("max_steps=10.5", "max_steps = 10.5: an integer is needed, this is a number."),
    ("max_steps=1e3", "max_steps = 1e3: an integer is needed"),
    ("max_steps=0", "max_steps = 0: must be at least 1."),
    ("max_steps=ten", "max_steps = ten: an integer is needed, this is text."),
    ("dry_run=yes", "dry_run = yes: true or false is needed, this is text."),
    ("dry_run=1", "dry_run = 1: true or false is needed, this is an integer."),
    ("log.level=verbose", "log.level = verbose: not one of the choices."),
    ("trainer.attn=flex2", "Nearest: flex; valid: auto, flash, flex, sdpa."),
    ("zero.stage=7", "zero.stage = 7: not one of the choices. Valid: 0, 1, 2, 3."),
    (
        "inference.port=70000",
        "inference.port = 70000: must be at most 65535. Valid: at least 0 and at most 65535.",
    ),
    ("run=mine", "run = mine: a table {key: value} is needed, this is text."),
    ("run.tags={v: 1.10}", "run.tags.v = 1.1: text is needed, this is a number. Quote it:"),
    ("seed=[1]", "seed = [1]: an integer is needed, this is a list."),
    ("env.reverse_text=5", "env.reverse_text = 5: a table {key: value} is needed, this is an integer."),
    ("algo={name: mine}", "algo.name = mine: no such option."),
    ("inference=external", "inference.base_url: missing. Set inference.base_url=...: URL ending in /v1."),
    ("loss=custom", "loss.import_path: missing."),
]

GRAMMAR = [
    ("rubbish", "rubbish: not of the form key=value."),
    ("run.name=a=b", """run.name = a=b: Hydra cannot read this unquoted. Write "run.name='a=b'"."""),
    ("run.name=a<b", """Write "run.name='a<b'"."""),
    ("run.name=naïve", """Write "run.name='naïve'"."""),
    ("ckpt.dir=~/here", """Write "ckpt.dir='~/here'"."""),
    ("run.name=it's", r"""Write 'run.name='"'"'it\'"'"'s'"'"''."""),
    ("rün.name=x", "A key is letters, digits"),
    ("optim.lr=1e-4,3e-4", "optim.lr = 1e-4,3e-4: several values. Add --multirun to sweep, write"),
]


COMPOSING = [
    ("run.tags=[a]", "run.tags = [a]: does not fit what is there (Cannot merge DictConfig with ListConfig)."),
    ("output_dir=${nope}", "output_dir: Interpolation key 'nope' not found."),
    ("output_dir=${oc.env:PRL_NO_SUCH_VARIABLE}", "output_dir: "),
    ("~run.nope", "run.nope: cannot be removed (Could not delete from config. 'run.nope' does not exist)."),
]


@pytest.mark.parametrize(("word", "expected"), [*NAMES, *COMPOSING])
def test_a_bad_choice_gives_one_message(refused, word: str, expected: str) -> None:
    messages = refused(word)
    assert len(messages) == 1, messages
    assert expected in messages[0]


@pytest.mark.parametrize(("word", "expected"), [*KEYS, *VALUES, *GRAMMAR])
def test_a_bad_word_gives_one_message(judge, word: str, expected: str) -> None:
    messages = judge(word)
    assert len(messages) == 1, messages
    assert expected in messages[0]


def test_everything_wrong_is_told_at_once(refused) -> None:
    words = "algo=gpro optim.lrr=1 optim.lr=-1 max_steps=x rollout.group_size=3 rollout.batch_size=8 a=b=c"
    text = "\n".join(refused(*words.split()))
    for path in (
        "a = b=c",
        "algo = gpro",
        "optim.lrr = 1",
        "optim.lr = -1",
        "max_steps = x",
        "rollout.group_size = 3",
    ):
        assert path in text
    assert len(text.splitlines()) == 6


def test_a_wrong_option_does_not_make_its_own_keys_wrong(refused) -> None:
    assert len(refused("algo=ehco", "algo.roles.tool.alpha=0.2")) == 1
    assert len(refused("scheduler=linaer", "scheduler.warmup_steps=5")) == 1


def test_a_refused_value_is_not_judged_by_the_default_in_its_place(refused) -> None:
    assert refused("rollout.batch_size=many", "rollout.group_size=7") == [
        "rollout.batch_size = many: an integer is needed, this is text."
    ]


def test_unknown_command_and_config_name(refused) -> None:
    assert "Nearest: sft; valid: " in refused(command="sfft")[0]
    assert "nope" in refused(config_name="nope")[0]


def test_config_dir_is_judged(refused, tmp_path) -> None:
    assert "no such directory" in refused(config_dirs=[tmp_path / "absent"])[0]
    (tmp_path / "algo").mkdir()
    (tmp_path / "algo" / "grpo.yaml").write_text("name: grpo\n")
    (message,) = refused(config_dirs=[tmp_path])
    assert "prl ships an option of this name" in message
