"""One process group of one rank for all in-process tests of the trainer."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prl.trainer import distributed


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[distributed.World]:
    torch.set_num_threads(1)
    joined = distributed.join(0, 1, tmp_path_factory.mktemp("group") / "store", timeout=60)
    distributed.import_deepspeed()
    yield joined
    distributed.leave(joined)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing compiled or counted before, and nothing left for the next test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with tied embeddings."""
    from trainer_lab import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tied")


@pytest.fixture(scope="session")
def untied_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from trainer_lab import make_model

    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    from trainer_lab import make_moe

    return make_moe(tmp_path_factory.mktemp("models") / "moe")
