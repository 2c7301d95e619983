"""Joining the group, and DeepSpeed without compiler or ballast."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from trainer_lab import REPO

from prl.trainer import distributed
from prl.trainer.distributed import World, all_gather_json, join, leave, local_place


def python(code: str, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in distributed.VARIABLES}
    environment |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_an_existing_group_is_adopted_and_not_ended(world: World, tmp_path: Path) -> None:
    adopted = join(5, 9, tmp_path / "unused", timeout=1)
    assert (adopted.rank, adopted.size, adopted.adopted) == (0, 1, True)
    leave(adopted)
    assert dist.is_initialized() and not (tmp_path / "unused").exists()


def test_half_an_environment_names_what_is_missing(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\nfrom prl.trainer.distributed import join\n"
        f"try: join(0, 1, Path({str(tmp_path / 'store')!r}), 5)\n"
        "except ValueError as error: print(error)"
    )
    message = python(code, MASTER_ADDR="127.0.0.1", RANK="0")
    assert message == "MASTER_ADDR is set without WORLD_SIZE, MASTER_PORT: set them all or none"


def test_ranks_meet_in_a_file_on_the_loopback(tmp_path: Path) -> None:
    code = (
        "import os\nfrom pathlib import Path\nfrom prl.trainer.distributed import join, leave\n"
        f"world = join(0, 1, Path({str(tmp_path / 'deep' / 'store')!r}), 5)\n"
        "leave(world)\nprint(world.size, os.environ['GLOO_SOCKET_IFNAME'], os.environ['LOCAL_RANK'])"
    )
    assert python(code) == "1 lo 0"


@pytest.mark.parametrize(
    ("told", "rank", "visible", "place"),
    [(None, 0, 1, 0), (None, 5, 4, 1), ("3", 11, 8, 3), ("3", 3, 1, 0), ("0", 9, 2, 0)],
)
def test_each_rank_takes_a_gpu_that_it_sees(told: str | None, rank: int, visible: int, place: int) -> None:
    assert local_place(told, rank, visible) == place


def test_deepspeed_comes_without_mlflow_inductor_and_compiled_ops() -> None:
    code = (
        "import sys\nfrom prl.trainer.distributed import import_deepspeed\n"
        "deepspeed = import_deepspeed()\n"
        "from deepspeed.runtime import compiler\n"
        "op = deepspeed.ops.__compatible_ops__['deepspeed_shm_comm']\n"
        "heavy = {'mlflow', 'torch._inductor.compile_fx'} & set(sys.modules)\n"
        "print(heavy, op, compiler.compile.__name__)"
    )
    assert python(code) == "set() False compile", "and mlflow and compile are there for whoever asks later"


def test_deepspeed_prints_no_memory_reports_into_tables(capfd: pytest.CaptureFixture[str]) -> None:
    from deepspeed.runtime import bf16_optimizer

    distributed.import_deepspeed()
    bf16_optimizer.see_memory_usage("begin bf16_optimizer", force=True)
    assert capfd.readouterr().out == ""


def test_gathering_alone_is_the_identity() -> None:
    value = {"a": [1, 2.5], "b": None}
    assert all_gather_json(value, World(0, 1, torch.device("cpu"))) == [value]


def test_gathering_keeps_each_ranks_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of different length: rows are padded to the longest and cut again."""
    texts = [b'{"a": 1}', b'{"long key": [1, 2, 3]}']
    longest = max(map(len, texts))

    def all_gather(out: list[torch.Tensor], mine: torch.Tensor) -> None:
        for target, text in zip(out, texts, strict=True):
            if mine.dtype == torch.int64:
                target.fill_(len(text))
            else:
                assert len(mine) == longest
                target.copy_(torch.tensor(list(text.ljust(longest, b"?")), dtype=torch.uint8))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    gathered = all_gather_json({"a": 1}, World(0, 2, torch.device("cpu")))
    assert gathered == [{"a": 1}, {"long key": [1, 2, 3]}]
