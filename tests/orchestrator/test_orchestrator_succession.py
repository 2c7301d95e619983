"""The address of a role that may be started again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from prl.orchestrator.succession import Succession
from prl.run_dir import RunDir


def publish(run: RunDir, address: str, pid: int) -> None:
    path = run.address_file("env/a")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"address": address, "pid": pid}))


def test_each_start_is_taken_once_even_at_the_same_port(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    async def scenario() -> None:
        succession = Succession(run, "env/a", 20.0)
        publish(run, "tcp://127.0.0.1:5", 1)
        assert await succession.next() == "tcp://127.0.0.1:5"
        waiting = asyncio.create_task(succession.next())
        await asyncio.sleep(0.2)
        assert not waiting.done(), "that is the dead one's"
        run.address_file("env/a").unlink()
        await asyncio.sleep(0.2)
        assert not waiting.done()
        publish(run, "tcp://127.0.0.1:5", 2)
        assert await waiting == "tcp://127.0.0.1:5"

    asyncio.run(scenario())


def test_patience_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="env/a published no new address within 0 s"):
        asyncio.run(Succession(RunDir(tmp_path), "env/a", 0.1).next())
