"""The run directory: one place that knows where everything of a run lies.

<output_dir>/<run.name>/
    configs/attempt_n/      resolved.yaml, command.txt, addresses/<role>.json
    logs/attempt_n/         one file per process; logs/latest points at the newest attempt
    metrics/<producer>.jsonl
    traces/                 stream.jsonl, index.jsonl, annotations.jsonl
    checkpoints/step_N/     trainer/, orchestrator/, COMPLETE (written last)
    batches/step_N/         packed batches, with rollout.transport=filesystem
    broadcasts/step_N/      weights for the engines, COMPLETE.json (written last)
    STATUS.md
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.05
BIND_VAR = "PRL_BIND_ADDRESS"
"""Set in the processes of a run that is spread over several machines: the address that the others reach."""


@dataclass(frozen=True)
class RunDir:
    """Paths of one run and of one attempt (launch) at it."""

    path: Path
    attempt: int = 1

    @property
    def configs(self) -> Path:
        return self.path / "configs" / f"attempt_{self.attempt}"

    @property
    def resolved_config(self) -> Path:
        return self.configs / "resolved.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs" / f"attempt_{self.attempt}"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def traces(self) -> Path:
        return self.path / "traces"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def broadcasts(self) -> Path:
        return self.path / "broadcasts"

    def log_file(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def metric_file(self, producer: str) -> Path:
        return self.metrics / f"{producer}.jsonl"

    def address_file(self, role: str) -> Path:
        return self.configs / "addresses" / f"{role}.json"

    @classmethod
    def from_resolved(cls, resolved: Path) -> RunDir:
        """The run directory that a `configs/attempt_n/resolved.yaml` belongs to."""
        attempt = resolved.resolve().parent
        return cls(attempt.parent.parent, int(attempt.name.removeprefix("attempt_")))

    def publish_address(self, role: str, address: str) -> None:
        """Tell the other processes where `role` listens, once it really does."""
        write_atomic(self.address_file(role), json.dumps({"address": address, "pid": os.getpid()}))

    async def wait_for_address(self, role: str, seconds: float) -> str:
        """Address published by `role`. Raises TimeoutError after `seconds`."""
        import asyncio  # a twentieth of a second that the launcher's answers need not wait for

        deadline = time.monotonic() + seconds
        while (address := self._address(role)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{role} published no address within {seconds:.0f} s")
            await asyncio.sleep(POLL_SECONDS)
        return address

    def wait_for_address_blocking(self, role: str, seconds: float) -> str:
        """`wait_for_address` for processes without an event loop."""
        import asyncio

        return asyncio.run(self.wait_for_address(role, seconds))

    def _address(self, role: str) -> str | None:
        try:
            return str(json.loads(self.address_file(role).read_text())["address"])
        except FileNotFoundError:
            return None


def bind_address(alone: str = "127.0.0.1") -> str:
    """Address that this process's servers bind: `alone`, unless other machines must reach them."""
    return os.environ.get(BIND_VAR, alone)


def write_atomic(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the whole new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
