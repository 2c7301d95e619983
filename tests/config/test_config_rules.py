"""Rules between fields: what each refuses, with its remedy, and that the neighbouring good input passes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

LINEAR, COSINE = "scheduler=linear", "scheduler=cosine"

POOLS = "curriculum=difficulty_pool curriculum.pools"

REFUSED = [
    (
        "rollout.group_size=3 rollout.batch_size=8",
        "rollout.group_size = 3: rollout.batch_size = 8 does not hold whole groups of 3. "
        "Nearest batch sizes: 6 or 9; group sizes that fit: 1, 2, 4, 8.",
    ),
    (
        "rollout.batch_size=8",
        "rollout.batch_size = 8 does not hold whole groups of 16. Nearest",
    ),
    ("env.reverse_text.group_size=5", "env.reverse_text.group_size = 5: rollout.batch_size = 128"),
    ("rollout.max_inflight=8", "rollout.max_inflight = 8: fewer than one group of env.reverse_text"),
    ("rollout.group_size=1", "rollout.group_size = 1: algo=grpo compares rollouts of one task"),
    ("rollout.group_size=1 algo=max_rl", "algo=max_rl compares"),
    ("rollout.group_size=1 algo=hierarchical_grpo env=[proposer_solver]", "algo=hierarchical_grpo compares"),
    ("env.reverse_text.group_size=1 +algo@env.reverse_text.algo=echo", "env.reverse_text.algo=echo compares"),
    ("env=[]", "env = []: a run needs at least one environment. Write env=[reverse_text]."),
    ("~env.reverse_text", "a run needs at least one environment"),
    ("+env.agg.id=reverse_text", "env.agg = agg: this name stands for all environments in the metrics."),
    ("+env.all.id=reverse_text", "env.all = all: this name"),
    (
        "rollout.sampling.top_p=0.9",
        "rollout.sampling.top_p = 0.9: the learner does not model nucleus sampling.",
    ),
    (
        "env.reverse_text.sampling.top_k=50",
        "env.reverse_text.sampling.top_k = 50: the learner does not model",
    ),
    (
        "env.reverse_text.sampling.min_p=0.1",
        "env.reverse_text.sampling.min_p = 0.1: the learner does not model min-p sampling. "
        "Set env.reverse_text.sampling.min_p=0.",
    ),
    (
        "+rollout.sampling.extra_body.repetition_penalty=1.1",
        "rollout.sampling.extra_body.repetition_penalty = 1.1: the learner does not model it",
    ),
    (
        "+env.reverse_text.sampling.extra_body.top_p=0.5",
        "env.reverse_text.sampling.extra_body.top_p = 0.5: it has a field. "
        "Set env.reverse_text.sampling.top_p.",
    ),
    ("rollout.sampling.max_tokens=512", "leaves no room for a prompt within inference.max_model_len = 512"),
    ("algo=opd model.teacher=null", "algo.teacher.model = null: algo=opd needs a teacher, and model tiny"),
    ("algo=sft model.teacher=null", "algo.teacher.model = null: algo=sft needs a teacher, and model tiny"),
    ("algo=opd algo.teacher.model=absent", "algo.teacher.model = absent: no model there"),
    (
        "algo=opd algo.teacher.model=m algo.teacher.base_url=http://h:1",
        "Write algo.teacher.base_url=http://h:1/v1.",
    ),
    ("algo=opsd algo.template=look", "algo.template = look: has no {demonstration}."),
    ("algo=hierarchical_grpo env=[proposer_solver] algo.episode_agents=[]", "at least one agent is needed"),
    ("algo=echo algo.roles={}", "algo.roles = {}: echo without a role learns nothing from it."),
    ("algo=echo algo.roles.robot.alpha=1", "algo.roles.robot = robot: no such message role."),
    ("algo=echo +algo.filter.import_path=nope", "algo.filter.import_path = nope: not an import path."),
    (
        "env=[reverse_text,arithmetic] +algo@env.arithmetic.algo=echo "
        "env.arithmetic.algo.loss_aggregation=prompt",
        "env.arithmetic.algo.loss_aggregation = prompt: algo.loss_aggregation = token must be the same",
    ),
    (
        "env=[reverse_text,arithmetic] +algo@env.arithmetic.algo=max_rl algo.loss_aggregation=prompt",
        "algo.loss_aggregation = prompt: env.arithmetic.algo=max_rl gives each token of env.arithmetic a "
        "weight of 1. Set algo.loss_aggregation=token.",
    ),
    ("curriculum.gates.dull.reject_min=1", "curriculum.gates.dull.reject_min = 1.0: above reject_max = 0"),
    (
        f"{POOLS}.hard.max_reward=0.75",
        "curriculum.pools.normal.max_reward = 0.75: curriculum.pools.hard ends",
    ),
    (
        f"{POOLS}.hard.weight=0 curriculum.pools.normal.weight=0 curriculum.pools.easy.weight=0 "
        "curriculum.unseen_weight=0",
        "curriculum.pools = hard, normal, easy: no weight is above 0",
    ),
    ("loss=icepop loss.ratio_low=6", "loss.ratio_low = 6.0: above loss.ratio_high = 5."),
    ("loss=cispo loss.ratio_low=6", "loss.ratio_low = 6.0: above loss.ratio_high = 5."),
    ("loss=ppo loss.max_importance_ratio=1", "loss.max_importance_ratio = 1.0: the cap lies below"),
    (
        "loss=custom loss.import_path=mine",
        "loss.import_path = mine: not an import path. Write package.module:Name.",
    ),
    ("inference=external inference.base_url=localhost", "inference.base_url = localhost: not a URL."),
    ("inference=external inference.base_url=http://h:8000", "Write inference.base_url=http://h:8000/v1."),
    ("model.name=small", "model.name = small: no bundled model 'small'; prl ships: tiny"),
    ("model.path=absent", "model.path = absent: no model there"),
    ("model.renderer=a:b:c", "model.renderer = a:b:c: not an import path."),
    (
        "model.renderer=qwen33",
        "model.renderer = qwen33: no such renderer. Nearest: qwen3; valid: auto, chatml,",
    ),
    (f"{LINEAR} scheduler.warmup_steps=0 scheduler.decay_steps=0", "neither warms up nor decays."),
    (f"{LINEAR} max_steps=null", "max_steps = null: a decay ends at max_steps."),
    (f"{LINEAR} max_steps=15", "warm-up and decay take 10 + 10 steps, the run has max_steps = 15."),
    (f"{COSINE} max_steps=null", "max_steps = null: a cosine ends at max_steps."),
    (f"{COSINE} max_steps=10", "scheduler.warmup_steps = 10: the warm-up takes all of max_steps = 10."),
    (f"{COSINE} scheduler.min_lr=1", "scheduler.min_lr = 1.0: above the peak, optim.lr = 0.0003."),
    ("zero=0 zero.offload_optimizer=true", "zero.offload_optimizer = true: stage 0 keeps"),
    ("zero=2 zero.offload_parameters=true", "zero.offload_parameters = true: zero.stage = 2 does not shard"),
    ("zero=1 zero.hpz_partition_size=2", "zero.hpz_partition_size = 2: zero.stage = 1"),
    (
        "zero=3 zero.hpz_partition_size=2",
        "zero.hpz_partition_size = 2: cluster.train_ranks = 1 is not a multiple",
    ),
    (
        "cluster.train_ranks=3 trainer.sequence_parallel=2",
        "trainer.sequence_parallel = 2: cluster.train_ranks = 3 is not a multiple of it.",
    ),
    (
        "cluster.train_ranks=4 trainer.sequence_parallel=4",
        "trainer.sequence_parallel = 4: the model's num_key_value_heads = 2 is not a multiple of it.",
    ),
    (
        "cluster.train_ranks=2 trainer.sequence_parallel=2 trainer.attn=sdpa",
        "trainer.sequence_parallel = 2: trainer.attn = sdpa would take each part of a row for a row.",
    ),
    ("optim=muon zero.offload_optimizer=true", "zero.offload_optimizer = true: optim=muon"),
    ("optim.betas=[0.9]", "optim.betas = [0.9]: two numbers are needed."),
    ("ckpt.keep_last=2", "ckpt.keep_last = 2: nothing is saved, so nothing is kept."),
    ("tracking.uri=./mlruns", "tracking.uri = ./mlruns: MLflow keeps runs in a database or on a server."),
    ("tracking.uri='file:///tmp/x'", "tracking.uri = file:///tmp/x: MLflow keeps"),
    ("output_dir=''", "output_dir = '': a directory is needed."),
    ("run.name='a/b'", "run.name = a/b: a name has no slashes"),
    ("run.name='..'", "run.name = ..: not a name."),
    ("run.name='-x'", "run.name = -x: a name cannot start with '-'"),
    ("run.name=.hidden", "run.name = .hidden: a name cannot start with '.'"),
    ("run.name=' x'", "a name cannot begin or end with a space."),
    (f"run.name={'n' * 201}", "a name has at most 200 bytes, this one 201."),
    ("run.resume=latest", "run.resume = latest: which run?"),
    ("run.resume=7", "run.resume = 7: which run?"),
    ("run.name=x run.resume=0", "run.resume = 0: steps count from 1."),
    ("run.resume=outputs/x/checkpoints/last", "run.resume = outputs/x/checkpoints/last: not a checkpoint."),
    ("run.resume=outputs/x/checkpoints/step_3", "no such directory."),
]

ACCEPTED = [
    "rollout.group_size=1 algo=rae",
    "rollout.group_size=1 algo=opsd",
    "rollout.group_size=1 algo=opd algo.teacher.model=tiny",
    "algo=sft algo.teacher.model=tiny rollout.sampling.top_p=0.9 rollout.group_size=1",
    "rollout.max_inflight=16",
    "algo=echo algo.roles.user.alpha=1",
    "env=[reverse_text,arithmetic] +algo@env.arithmetic.algo=rae env.arithmetic.group_size=1",
    "loss=icepop loss.ratio_low=5",
    "loss=custom loss.import_path=package.module:function",
    "inference=external inference.base_url=https://host/v1/",
    f"{LINEAR} max_steps=20",
    f"{LINEAR} scheduler.decay_steps=0 max_steps=null",
    f"{COSINE} max_steps=11",
    "zero=3 zero.offload_parameters=true zero.hpz_partition_size=2 cluster.train_ranks=4",
    "ckpt=interval ckpt.interval=null ckpt.at_end=true",
    "tracking.uri='sqlite:////tmp/x.db'",
    "run.name='two words' run.tags.note='a=b'",
    "run.name='naïve'",
    "optim=sign_sgd",
]


def words_of(text: str) -> list[str]:
    """Split at spaces outside quotes; quotes stay, they are Hydra's."""
    words, quoted = [""], False
    for character in text:
        quoted ^= character in "'{}"
        if character == " " and not quoted:
            words.append("")
        else:
            words[-1] += character
    return words


@pytest.mark.parametrize(("text", "expected"), REFUSED)
def test_combination_is_refused_with_one_message(judge, text: str, expected: str) -> None:
    messages = judge(*words_of(text))
    assert len(messages) == 1, messages
    assert expected in messages[0]


@pytest.mark.parametrize("text", ACCEPTED)
def test_neighbouring_combination_is_accepted(judge, caplog, text: str) -> None:
    assert judge(*words_of(text)) == []
    assert not caplog.records


@pytest.mark.parametrize(("text", "expected"), REFUSED[::9])
def test_rules_are_heard_when_composing(refused, text: str, expected: str) -> None:
    (message,) = refused(*words_of(text))
    assert expected in message


WARNED = [
    ("algo=opsd rollout.sampling.temperature=0.7", "compares with a teacher that scores at temperature 1"),
    ("trainer.seq_len=256", "trainer.seq_len = 256: shorter than inference.max_model_len = 512"),
    ("ckpt.interval=50", "the run ends at max_steps = 30, before the first checkpoint"),
    ("ckpt=interval ckpt.keep_interval=15", "ckpt.keep_interval = 15: not a multiple of ckpt.interval = 10"),
]


@pytest.mark.parametrize(("text", "expected"), WARNED)
def test_doubtful_combination_is_warned_about(judge, caplog, text: str, expected: str) -> None:
    with caplog.at_level(logging.WARNING):
        assert judge(*words_of(text)) == []
    (record,) = caplog.records
    assert record.getMessage().startswith("warning: ") and expected in record.getMessage()


def test_a_warning_does_not_refuse(rl, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        rl("trainer.seq_len=256")
    (record,) = caplog.records
    assert record.getMessage().startswith("warning: trainer.seq_len = 256")


def test_a_name_is_taken_by_what_is_in_its_directory(rl, refused) -> None:
    Path("outputs/mine").mkdir(parents=True)
    rl("run.name=mine")
    Path("outputs/mine/STATUS.md").write_text("a run")
    (message,) = refused("run.name=mine")
    assert "run.name = mine: outputs/mine exists. Continue it by run.resume=latest" in message
    rl("run.name=mine", "run.clean=true")
    rl("run.name=mine", "run.resume=latest")
    rl("run.name=mine", "output_dir=elsewhere")


def test_a_checkpoint_directory_of_another_run_can_be_resumed(rl) -> None:
    Path("outputs/old/checkpoints/step_3").mkdir(parents=True)
    assert rl("run.resume=outputs/old/checkpoints/step_3").run.name.startswith("reverse_text--tiny--")


def test_export_needs_its_source(refused) -> None:
    assert "run: missing." in refused(command="export")[0]
    assert "run = nowhere: no such directory." in refused("run=nowhere", command="export")[0]


def test_training_rules_hold_for_sft_too(refused) -> None:
    assert "a cosine ends" in refused("scheduler=cosine", "max_steps=null", command="sft")[0]
    assert "unknown key" in refused("rollout.batch_size=4", command="sft")[0]
