"""One process group of one rank for all tests of supervised fine-tuning."""

from __future__ import annotations

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from collections.abc import Iterator

import pytest
import torch

from prl.trainer import distributed


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[distributed.World]:
    torch.set_num_threads(1)
    joined = distributed.join(0, 1, tmp_path_factory.mktemp("group") / "store", timeout=60)
    yield joined
    distributed.leave(joined)
