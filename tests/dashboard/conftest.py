from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served_dashboard import Client, served
from synthetic_runs import Shape, write_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, one that still goes on, and a sweep of four."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "done", Shape(episodes=256))
    write_run(root / "going", Shape(episodes=64, ended=None, seed=1))
    for element, (lr, loss) in enumerate([(1e-4, "ipo"), (3e-4, "ipo"), (1e-4, "icepop"), (1e-3, "icepop")]):
        shape = Shape(episodes=640, lr=lr, loss=loss, seed=element, speed=0.6 + 0.3 * element)
        write_run(root / "sweep" / str(element), shape)
    return root


@pytest.fixture(scope="session")
def client(runs: Path) -> Iterator[Client]:
    with served([runs]) as asking:
        yield asking
