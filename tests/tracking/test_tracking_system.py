from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from prl.tracking.reader import read_metrics
from prl.tracking.system import Gpus, SystemMetrics, machine, traffic


def wait_until(condition: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_the_machine_under_the_names_that_mlflow_shows(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert all(name.startswith("system/") for name in found)
    assert 0 < found["system/system_memory_usage_percentage"] <= 100
    assert 0 <= found["system/disk_usage_percentage"] <= 100 and found["system/disk_available_megabytes"] >= 0


def test_traffic_counts_from_the_beginning_of_the_run() -> None:
    before, after = (
        SimpleNamespace(bytes_recv=1e6, bytes_sent=0),
        SimpleNamespace(bytes_recv=3e6, bytes_sent=5e6),
    )
    assert traffic(before, after) == {
        "system/network_receive_megabytes": 2.0,
        "system/network_transmit_megabytes": 5.0,
    }
    assert traffic(None, after) == {}


def test_nothing_is_told_before_the_run_told_something(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    system = SystemMetrics(tmp_path, 0.02)
    system.start()
    time.sleep(0.3)
    assert list(metrics.iterdir()) == []
    (metrics / "trainer.jsonl").write_text(json.dumps({"producer": "trainer", "step": 1, "time": 1.0}) + "\n")
    wait_until(lambda: (metrics / "system.jsonl").exists() and len(read_metrics(metrics)) > 3)
    system.close()
    lines = [record for record in read_metrics(metrics) if record.producer == "system"]
    assert lines and all(record.step is None for record in lines)
    assert "system/cpu_utilization_percentage" in lines[0].values


def test_it_ends_when_it_is_told_to(tmp_path: Path) -> None:
    system = SystemMetrics(tmp_path, 600)
    system.start()
    system.close(60)
    assert not system._thread.is_alive()


class FakeNvml(ModuleType):
    """Two GPUs, of which the second does not tell its power."""

    class NVMLError(Exception):
        pass

    def __init__(self, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.broken = broken

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=25e6, total=100e6)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=40 + handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError("Not Supported")
        return 250_000


def test_gpus_tell_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    found = Gpus().read()
    assert found["system/gpu_0_power_usage_watts"] == 250 and "system/gpu_1_power_usage_watts" not in found
    assert found["system/gpu_1_utilization_percentage"] == 41
    assert found["system/gpu_0_memory_usage_percentage"] == 25


@pytest.mark.parametrize("library", [None, FakeNvml(broken=True)])
def test_a_machine_without_gpus_has_none(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert Gpus().read() == {}
