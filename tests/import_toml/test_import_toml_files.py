"""Files that exercise the format's documented fields become options that compose, and mean the same."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prl.__main__ import main as prl
from prl.assets import bundled_model
from prl.config.algo import EchoConfig, EchoRoleConfig, LengthPenaltyConfig
from prl.config.cluster import SlurmConfig
from prl.config.command_line import parse
from prl.config.compose import compose_job
from prl.import_toml.main import TRANSLATORS, detect, translate

FILES = Path(__file__).parent / "files"
NAMES = sorted(path.stem for path in FILES.glob("*.toml"))


def settings(command: str, name: str) -> list[str]:
    """What only the machine knows: where the model is, and an environment that has vLLM."""
    local = [] if command == "eval" else [f"model.path={bundled_model('tiny')}"]
    has_engine = "[inference" in (FILES / f"{name}.toml").read_text()
    return [*local, *([f"inference.python={sys.executable}"] if has_engine else [])]


def imported(name: str, where: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """(config of the printed command line, what was printed)."""
    command = detect(tomllib.loads((FILES / f"{name}.toml").read_text()))
    out = where / "imported"
    words = ["import-toml", str(FILES / f"{name}.toml"), "--out", str(out), *settings(command, name)]
    code = prl(words)
    printed = capsys.readouterr()
    assert code == 0, printed.err
    (line,) = [line for line in printed.out.splitlines() if line.startswith("python -m prl")]
    parsed = parse(shlex.split(line)[3:], list(TRANSLATORS))
    return compose_job(parsed.command, parsed.overrides, parsed.config_dirs), printed.out


@pytest.mark.parametrize("name", NAMES)
def test_every_file_becomes_an_option_that_composes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config, out = imported(name, tmp_path, capsys)
    assert "it composes and passes the checks" in out
    said = tomllib.loads((FILES / f"{name}.toml").read_text()).get("max_steps")
    assert getattr(config, "max_steps", None) == said


def test_there_are_files_of_every_kind() -> None:
    kinds = [detect(tomllib.loads((FILES / f"{name}.toml").read_text())) for name in NAMES]
    assert len(kinds) >= 6 and set(kinds) == set(TRANSLATORS)


def test_an_rl_file_in_full(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config, out = imported("rl_full", tmp_path, capsys)
    assert (config.run.name, config.run.tags, config.tracking.name) == (
        "full",
        {"group": "sweep-1", "baseline": "true"},
        "mlflow",
    )
    assert (config.tracking.experiment, config.log.level, config.log.format) == ("math", "debug", "json")
    assert (config.ckpt.interval, config.ckpt.at_end, config.ckpt.keep_last, config.ckpt.keep_interval) == (
        50,
        True,
        2,
        100,
    )
    assert (config.env_vars.all, config.env_vars.trainer) == ({"HF_HUB_OFFLINE": "1"}, {"NCCL_DEBUG": "WARN"})
    assert config.env_vars.inference == {"VLLM_LOGGING_LEVEL": "WARNING"}
    assert (config.sync.name, config.sync.timeout, config.rollout.transport) == ("filesystem", 900.0, "zmq")
    assert (config.cluster.train_ranks, config.cluster.infer_gpus) == (4, 2)
    trainer = config.trainer
    assert (trainer.seq_len, trainer.attn, trainer.lm_head_chunk, trainer.recompute) == (
        4096,
        "flash",
        4096,
        "full",
    )
    assert (trainer.gc_interval, trainer.dist_timeout) == (20, 1800.0)
    assert (config.zero.stage, config.zero.offload_optimizer) == (3, True)
    assert (config.loss.name, config.loss.ratio_low, config.loss.ratio_high) == ("icepop", 0.5, 4.0)
    assert (config.optim.lr, config.optim.betas, config.optim.max_norm) == (1e-6, [0.9, 0.99], None)
    assert (config.scheduler.name, config.scheduler.warmup_steps, config.scheduler.decay_steps) == (
        "linear",
        5,
        50,
    )
    rollout = config.rollout
    assert (rollout.batch_size, rollout.group_size, rollout.max_off_policy_steps) == (256, 8, 4)
    assert (rollout.initial_inflight, rollout.max_inflight, rollout.tasks_per_minute) == (64, 512, 600)
    assert (rollout.sampling.temperature, rollout.sampling.max_tokens) == (0.9, 1024)
    assert config.algo.length_penalty == LengthPenaltyConfig(output_tokens=0.1)
    assert (config.inference.vllm, config.inference.port) == ({"enforce_eager": True}, 8000)
    for key in (
        "monitors.wandb.entity",
        "trainer.matmul_precision",
        "trainer.model.impl",
        "log.log_data",
    ):
        assert f"  {key}: " in out
    assert (config.eval.interval, config.eval.env["arithmetic"].interval) == (25, 50)
    assert config.eval.env["arithmetic"].select.limit == 64 and config.eval.skip_first_step


def test_sources_of_an_rl_file(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = imported("rl_full", tmp_path, capsys)
    words, sums = config.env["words"], config.env["arithmetic"]
    assert set(config.env) == {"words", "arithmetic"}
    assert (words.id, words.taskset, words.ratio) == ("reverse_text", {"min_length": 4}, 2.0)
    assert (words.workers, words.elastic, words.multiplex, words.min_abs_advantage) == (4, True, 64, 0.01)
    assert (sums.workers, sums.elastic, sums.timeout, sums.group_size) == (2, False, 60.0, 4)
    assert (sums.select.limit, sums.select.shuffle, sums.select.exclude.idx) == (1000, True, [3, "10:20"])
    assert sums.algo == EchoConfig(roles={"user": EchoRoleConfig(0.2)})
    assert (sums.curriculum.name, sums.curriculum.gates["solved"].reject_max) == ("difficulty_pool", 0.0)


def test_distillation_and_an_engine_that_runs_already(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = imported("rl_distill", tmp_path, capsys)
    assert (config.algo.name, config.algo.teacher.model) == ("opd", "Qwen/Qwen3-8B")
    assert config.algo.teacher.base_url == "http://10.0.0.6:8000/v1"
    assert (config.inference.name, config.inference.base_url) == ("external", "http://10.0.0.5:8000/v1")
    assert config.inference.api_key_var == "ENGINE_KEY"
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (16, 16.0, ["q_proj", "v_proj"])
    assert (config.optim.name, config.optim.momentum, config.loss.name) == ("muon", 0.9, "ppo")
    assert (config.tracking.name, config.ckpt.at_end) == ("none", False)


def test_many_nodes(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = imported("rl_slurm", tmp_path, capsys)
    cluster = config.cluster
    assert isinstance(cluster, SlurmConfig)
    assert (cluster.train_nodes, cluster.infer_nodes, cluster.train_ranks, cluster.infer_gpus) == (
        2,
        2,
        16,
        16,
    )
    assert (cluster.partition, cluster.account, cluster.time, cluster.pre_run) == (
        "gpu",
        "lab",
        "12:00:00",
        "module load cuda",
    )
    assert (cluster.max_requeues, cluster.job_name, cluster.gpus_per_node) == (5, "selfplay", 8)
    assert (config.zero.stage, config.trainer.compile) == (3, True)
    assert config.env["kuhn_poker"].agents == {"player0": {"max_turns": 4}}
    assert (config.algo.name, config.algo.decay) == ("rae", 0.9)


def test_supervised_files(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = imported("sft", tmp_path, capsys)
    assert (config.data.name, config.data.path, config.data.batch_size, config.data.seed) == (
        "rows",
        "PrimeIntellect/Reverse-Text-SFT",
        64,
        7,
    )
    assert (config.trainer.seq_len, config.trainer.recompute, config.optim.name) == (1024, "selective", "sgd")
    assert (config.data.loss_mask.user, config.data.columns.messages) == (True, "conversation")
    assert (config.val.interval, config.val.at_start, config.val.data.splits) == (50, True, ["test"])
    assert (config.cluster.train_ranks, config.ckpt.at_end) == (2, True)
    config, _ = imported("sft_eval", tmp_path, capsys)
    assert (config.eval.interval, config.eval.env["reverse_text"].group_size) == (20, 4)
    assert (config.inference.name, config.cluster.infer_gpus) == ("vllm", 1)
    config, _ = imported("sft_fake", tmp_path, capsys)
    assert (config.data.length, config.data.tokens, config.optim.name) == ("variable", "random", "sign_sgd")
    assert config.zero.offload_parameters and config.zero.offload_optimizer and config.zero.stage == 3


def test_an_evaluation(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    config, _ = imported("eval", tmp_path, capsys)
    assert (config.model.name, config.client.base_url, config.client.api_key_var) == (
        "my/model",
        "http://127.0.0.1:8000/v1",
        "MY_KEY",
    )
    assert (config.rollout.group_size, config.concurrency, config.run.name) == (4, 64, "suite")
    assert list(config.env) == ["word_problems", "short"]
    assert (config.env["short"].group_size, config.env["short"].sampling.temperature) == (8, 0.0)
    assert all(env.agents == {"solver": {"max_turns": 8}} for env in config.env.values())
    assert (config.select.limit, config.rollout.sampling.max_tokens) == (32, 512)


def test_later_files_win(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.toml").write_text('max_steps = 7\n[trainer.optim]\nlr = "1e-5"\n'.replace('"', ""))
    words = [
        "import-toml",
        str(FILES / "rl_minimal.toml"),
        "more.toml",
        "--out",
        "o",
        *settings("rl", "rl_minimal"),
    ]
    assert prl(words) == 0
    capsys.readouterr()
    config = compose_job("rl", ["experiment=more", *settings("rl", "rl_minimal")], ["o"])
    assert (config.max_steps, config.optim.lr, config.rollout.group_size) == (7, 1e-5, 16)


def test_silence_has_the_meaning_of_the_format() -> None:
    notes = translate("rl", tomllib.loads('[[orchestrator.train.source]]\nenv={taskset={id="x"}}\n'))
    assert notes.values["max_steps"] is None and notes.values["rollout.group_size"] == 1
    assert notes.values["trainer.seq_len"] == 2048
    assert notes.choices["inference"] == "external" and notes.choices["tracking"] == "none"
