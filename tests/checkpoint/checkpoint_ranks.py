"""Tiny training engines in real rank processes: `spawn` runs a program of phases, one result per phase.

As a program (`python checkpoint_ranks.py program.json`) it is one rank, told so by environment variables.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
ROWS = 2
"""Rows of a step over all ranks."""


def spawn(world: int, phases: list[dict[str, Any]], where: Path, dies: bool = False) -> list[Any]:
    """Run `phases` on `world` ranks in directory `where`; the result of each, as rank 0 saw it."""
    where.mkdir(parents=True, exist_ok=True)
    program = where / "program.json"
    program.write_text(json.dumps(phases))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [_start(rank, world, port, program) for rank in range(world)]
    codes = _wait(processes)
    if dies:
        assert any(codes), "no rank died"
        return []
    logs = "\n".join((where / f"rank_{rank}.log").read_text()[-3000:] for rank in range(world))
    assert codes == [0] * world, f"exit codes {codes}\n{logs}"
    return json.loads((where / "result.json").read_text())


def _start(rank: int, world: int, port: int, program: Path) -> subprocess.Popen[bytes]:
    settings = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    with program.with_name(f"rank_{rank}.log").open("w") as log:
        command = [sys.executable, __file__, str(program)]
        return subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes. Once a rank failed, the others, which may wait for it, are killed."""
    left = list(processes)
    try:
        while left:
            for process in left:
                try:
                    failed = process.wait(timeout=0.2) != 0
                except subprocess.TimeoutExpired:
                    continue
                if failed:
                    return [p.poll() if p.poll() is not None else -1 for p in processes]
                left.remove(process)
                break
        return [0] * len(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tiny_model(seed: int, tied: bool = True) -> Any:
    """A random Qwen3 of odd sizes, so that shards cut through rows."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    shape = {
        "vocab_size": 61,
        "hidden_size": 20,
        "intermediate_size": 27,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "max_position_embeddings": 64,
    }
    return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=tied))


def tiny_moe() -> Any:
    """A random Qwen3-MoE, always the same: adapters are what differs. Shards cut through its experts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": 61,
        "hidden_size": 24,
        "intermediate_size": 27,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape))


class Trainer:
    """prl's own engine. `case`: zero, optim (name of a config class, keyword arguments), dtype, tied, moe."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        from prl.config import training
        from prl.config.schema import SftConfig
        from prl.trainer.distributed import join
        from prl.trainer.engine import TrainEngine
        from prl.trainer.model import make_policy

        name, options = case.get("optim", ["AdamWConfig", {"lr": 1e-2, "betas": [0.9, 0.95]}])
        dtype = case.get("dtype", "float32")
        config = SftConfig(
            data=None,
            optim=getattr(training, name)(**options),
            scheduler=training.LinearConfig(warmup_steps=4, decay_steps=2),
            zero=training.ZeroConfig(**case["zero"]),
            trainer=training.TrainerConfig(dtype=dtype, attn="sdpa", lm_head_chunk=0),
            lora=training.LoraConfig(**case.get("lora", {})),
            max_steps=8,
        )
        self.world = join(0, 1, Path("unused"), 300)
        policy = tiny_moe() if case.get("moe") else tiny_model(seed, case.get("tied", True))
        policy = make_policy(policy.bfloat16() if dtype == "bfloat16" else policy, config.trainer)
        self.engine = TrainEngine(config, self.world, 8, model=policy)
        self.deepspeed, self.model = self.engine.deepspeed, policy

    def step(self, step: int, rows: Any) -> Any:
        import torch

        total = torch.zeros(())
        for row in rows:
            positions, ones = torch.arange(len(row)), torch.ones(len(row))
            logprobs, _ = self.engine.forward(row, positions, ones, (len(row),))
            loss = -logprobs[1:].sum() / (ROWS * (len(row) - 1))
            self.engine.backward(loss)
            total += loss.detach()
        self.engine.step(step)
        return total


class Plain:
    """DeepSpeed with torch's AdamW: two parameter groups and a frozen layer. `case`: zero, DeepSpeed's."""

    def __init__(self, case: dict[str, Any], seed: int) -> None:
        import torch

        from prl.trainer.distributed import import_deepspeed, join

        self.world = join(0, 1, Path("unused"), 300)
        self.model = tiny_model(seed, case.get("tied", True)).train()
        self.model.model.layers[0].requires_grad_(False)
        self.model.register_buffer("steps_seen", torch.full((3,), float(seed)))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
        ]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": ROWS // self.world.size,
            "gradient_clipping": 0.0,
            "zero_optimization": case["zero"],
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }
        self.deepspeed, *_ = import_deepspeed().initialize(
            model=self.model,
            model_parameters=trained,
            optimizer=torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
            config=config,
        )

    def step(self, step: int, rows: Any) -> Any:
        import torch

        total = torch.zeros(())
        for row in rows:
            loss = self.deepspeed(input_ids=row[None], labels=row[None], use_cache=False).loss
            self.deepspeed.backward(loss)
            self.deepspeed.step()
            total += loss.detach() / ROWS
        return total


def build(case: dict[str, Any], seed: int) -> Any:
    return (Plain if case.get("plain") else Trainer)(case, seed)


def train(trainer: Any, first: int, last: int) -> list[float]:
    """Losses of steps `first` to `last`. A step has the same rows at every world size."""
    import torch
    import torch.distributed as dist

    losses = []
    for step in range(first, last + 1):
        rows = torch.randint(0, 61, (ROWS, 16), generator=torch.Generator().manual_seed(1000 + step))
        share = ROWS // trainer.world.size
        loss = trainer.step(step, rows[trainer.world.rank * share :][:share])
        dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


def full_state(trainer: Any) -> dict[str, Any]:
    """Whole compute weights, float32 weights and Adam moments, through DeepSpeed's public accessors."""
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine, stage = trainer.deepspeed, trainer.deepspeed.zero_optimization_stage()
    adam = isinstance(engine.optimizer if stage == 0 else engine.optimizer.optimizer, torch.optim.AdamW)
    if adam and stage in (1, 2):
        engine.optimizer._hp_optimizer_states_linked = False  # DeepSpeed links once, in its first step
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {
        f"buffer.{name}": b.clone() for name, b in trainer.model.named_buffers() if "inv_freq" not in name
    }
    for name, p in trainer.model.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
            found[f"compute.{name}"] = p.detach().clone()
        if not p.requires_grad:
            continue
        found[f"master.{name}"] = (safe_get_full_fp32_param(p) if stage else p).detach().clone()
        for key in ("exp_avg", "exp_avg_sq") if adam else ():
            moment = safe_get_full_optimizer_state(p, key) if stage else engine.optimizer.state[p][key]
            found[f"moment.{key}.{name}"] = moment.detach().clone()
    return found


def differing(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of entries that are not bitwise equal or that one side lacks."""
    import torch

    absent = set(left) ^ set(right)
    return sorted(absent | {n for n in left.keys() & right.keys() if not torch.equal(left[n], right[n])})


def phase_save(case: dict[str, Any]) -> dict[str, Any]:
    """Train steps 1 and 2, save, train 3 and 4; keep the full state for `phase_resume`."""
    import torch

    from prl.checkpoint.save import save_trainer

    trainer, path = build(case, seed=0), Path(case["path"])
    before = train(trainer, 1, 2)
    save_trainer(trainer.deepspeed, path, {"tokens": 128})
    at_save = full_state(trainer)
    after = train(trainer, 3, 4)
    if trainer.world.rank == 0:
        torch.save({"save": at_save, "losses": after}, path.with_suffix(".reference"))
    trainer.deepspeed.destroy()
    return {"before": before, "after": after, "files": sorted(f.name for f in path.iterdir())}


def phase_resume(case: dict[str, Any]) -> dict[str, Any]:
    """Load into an engine of other weights, compare with the reference, train on, compare the losses."""
    import torch

    from prl.checkpoint.load import load_trainer
    from prl.config.training import CkptConfig

    trainer, path = build(case, seed=99), Path(case["path"])
    extra = load_trainer(trainer.deepspeed, path, CkptConfig(**case.get("ckpt", {})))
    reference = torch.load(path.with_suffix(".reference"))
    counters = [trainer.deepspeed.global_steps, trainer.deepspeed.global_samples]
    fresh = case.get("ckpt", {}).get("skip_optimizer", False)
    different = [] if fresh else differing(full_state(trainer), reference["save"])
    losses = train(trainer, 3, 4)
    trainer.deepspeed.destroy()
    return {
        "extra": extra,
        "counters": counters,
        "different": different,
        "same_losses": losses == reference["losses"],
        "error": max(abs(a - b) for a, b in zip(losses, reference["losses"], strict=True)),
    }


def phase_refused(case: dict[str, Any]) -> str:
    """The message with which a load is refused."""
    from prl.checkpoint.load import load_trainer
    from prl.config.training import CkptConfig

    trainer = build(case, seed=1)
    try:
        load_trainer(trainer.deepspeed, Path(case["path"]), CkptConfig())
    except ValueError as error:
        return str(error)
    return "not refused"


def phase_publish(case: dict[str, Any]) -> None:
    """Train, save, and keep the weights that the engine would send to inference as `<path>.weights`."""
    import torch

    from prl.checkpoint.save import save_trainer

    trainer, path = build(case, seed=0), Path(case["path"])
    train(trainer, 1, 2)
    save_trainer(trainer.deepspeed, path, {})
    tensors = {name: tensor.clone() for name, tensor in trainer.engine.full_tensors()}
    if trainer.world.rank == 0:
        torch.save(tensors, path.with_suffix(".weights"))


def phase_killed(case: dict[str, Any]) -> None:
    """The last rank kills itself within a save, where it would use `at`."""
    from prl.checkpoint import save

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    trainer = build(case, seed=0)
    train(trainer, 1, 1)
    if case["at"] == "async":
        kill_beside_training(trainer, Path(case["path"]).parent, die)
    if trainer.world.rank == trainer.world.size - 1:
        setattr(save, case["at"], SimpleNamespace(save=die) if case["at"] == "dcp" else die)
    save.save_trainer(trainer.deepspeed, Path(case["path"]), {})


def kill_beside_training(trainer: Trainer, directory: Path, die: Any) -> None:
    """A thread has written the tensors and waits, a step is trained meanwhile, then the process dies."""
    import threading

    from prl.checkpoint import save
    from prl.config.training import CkptConfig
    from prl.trainer import checkpoints

    there = threading.Event()
    save.write_rng = lambda *_: (there.set(), threading.Event().wait(60))
    step, ckpt = int(directory.name.removeprefix("step_")), CkptConfig(async_save=True, keep_last=1)
    checkpoints.save(trainer.engine, ckpt, directory.parent, step, parts=("trainer",), timeout=60)
    train(trainer, 2, 2)
    assert there.wait(60)
    die()


def phase_async(case: dict[str, Any]) -> dict[str, Any]:
    """Save in the background, train on while a held thread has not written, resume from what was written."""
    import threading

    from prl.checkpoint import save as save_module
    from prl.checkpoint.marker import is_complete
    from prl.config.training import CkptConfig
    from prl.trainer import checkpoints

    trainer, root = build(case, seed=0), Path(case["root"])
    ckpt = CkptConfig(async_save=True, keep_last=1)
    train(trainer, 1, 2)
    may_write, write_state = threading.Event(), save_module.write_state
    save_module.write_state = lambda *args: may_write.wait(60) and write_state(*args)
    checkpoints.save(trainer.engine, ckpt, root, 2, parts=("trainer",), timeout=60)
    train(trainer, 3, 3)
    before = is_complete(root / "step_2")
    may_write.set()
    checkpoints.save(trainer.engine, ckpt, root, 3, parts=("trainer",), timeout=60)
    trainer.engine.saver.wait()
    steps = sorted(p.name for p in root.glob("step_*"))

    save_module.write_state = lambda *args: (_ for _ in ()).throw(OSError("no space left"))
    checkpoints.save(trainer.engine, ckpt, root, 4, parts=("trainer",), timeout=60)
    failure = "none"
    try:
        trainer.engine.saver.wait()
    except RuntimeError as error:
        failure = str(error)
    save_module.write_state = write_state
    return {"before": before, "steps": steps, "failure": failure, "after": is_complete(root / "step_4")}


def phase_random(case: dict[str, Any]) -> dict[str, bool]:
    """Whether Python, NumPy and torch draw after a load what they drew after the save."""
    import numpy as np
    import torch

    from prl.checkpoint.load import load_trainer
    from prl.checkpoint.save import save_trainer
    from prl.config.training import CkptConfig

    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.standard_normal()), torch.rand(()).item()]

    trainer, path = build(case, seed=0), Path(case["path"])
    draw()
    save_trainer(trainer.deepspeed, path, {})
    drawn = draw()
    load_trainer(trainer.deepspeed, path, CkptConfig())
    again = draw()
    load_trainer(trainer.deepspeed, path, CkptConfig(skip_progress=True))
    return {"restored": again == drawn, "skipped": draw() != drawn}


def main() -> None:
    import torch
    import torch.distributed as dist

    from prl.trainer.distributed import import_deepspeed, join

    program = Path(sys.argv[1])
    torch.set_num_threads(1)
    import_deepspeed().utils.logger.setLevel("ERROR")
    world = join(0, 1, Path("unused"), 300)
    results = []
    for phase in json.loads(program.read_text()):
        results.append(globals()[f"phase_{phase.pop('do')}"](phase))
        dist.barrier()
    if world.rank == 0:
        program.with_name("result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as ranks of a run do
