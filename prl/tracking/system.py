"""Load of the machine as metrics, under the names that the MLflow UI shows as system metrics.

Looks begin when the run has told its first metric: before that the processes that start need the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from prl.tracking.pulse import Pulse, told_bytes
from prl.tracking.stream import MetricStream

log = logging.getLogger(__name__)

MEGABYTE = 1e6


class SystemMetrics(Pulse):
    """Appends a line to `<run>/metrics/system.jsonl` every `seconds`, until `close`."""

    def __init__(self, run: Path, seconds: float) -> None:
        super().__init__("system-metrics", seconds)
        self._run = run
        self._size = told_bytes(run)
        self._stream: MetricStream | None = None
        self._gpus: Gpus | None = None
        self._before: Any = None

    def beat(self) -> None:
        if self._stream is not None and self._gpus is not None:
            now = psutil.net_io_counters()
            self._stream.log({**machine(self._run), **traffic(self._before, now), **self._gpus.read()})
        elif told_bytes(self._run) > self._size:
            self._stream = MetricStream(self._run / "metrics" / "system.jsonl", "system")
            self._gpus, self._before = Gpus(), psutil.net_io_counters()
            psutil.cpu_percent()  # the first call only starts the clock

    def end(self) -> None:
        if self._stream is not None:
            self._stream.close()


def machine(disk: Path) -> dict[str, float]:
    """CPU since the last call, memory, and the disk that holds `disk`."""
    memory, space = psutil.virtual_memory(), psutil.disk_usage(str(disk))
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_megabytes": memory.used / MEGABYTE,
        "system/system_memory_usage_percentage": memory.percent,
        "system/disk_usage_percentage": space.percent,
        "system/disk_available_megabytes": space.free / MEGABYTE,
    }


def traffic(before: Any, after: Any) -> dict[str, float]:
    """Network since the run began; nothing on a machine without one."""
    if before is None or after is None:
        return {}
    return {
        "system/network_receive_megabytes": (after.bytes_recv - before.bytes_recv) / MEGABYTE,
        "system/network_transmit_megabytes": (after.bytes_sent - before.bytes_sent) / MEGABYTE,
    }


class Gpus:
    """NVIDIA GPUs through their management library; none where it is not installed or finds no driver."""

    def __init__(self) -> None:
        self._library: Any = None
        self._count = 0
        try:
            import pynvml
        except ImportError:
            log.info("pynvml is not installed (pip install nvidia-ml-py): no GPU metrics")
            return
        try:
            pynvml.nvmlInit()
            self._count = pynvml.nvmlDeviceGetCount()
            self._library = pynvml
        except pynvml.NVMLError as error:
            log.info("no GPU metrics: %s", error)

    def read(self) -> dict[str, float]:
        """Utilisation, memory and power of each GPU, as far as the driver tells."""
        return {name: value for index in range(self._count) for name, value in self._of(index)}

    def _of(self, index: int) -> Iterator[tuple[str, float]]:
        library, prefix = self._library, f"system/gpu_{index}"
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            memory = library.nvmlDeviceGetMemoryInfo(handle)
            yield f"{prefix}_memory_usage_megabytes", memory.used / MEGABYTE
            yield f"{prefix}_memory_usage_percentage", 100 * memory.used / memory.total
            yield f"{prefix}_utilization_percentage", library.nvmlDeviceGetUtilizationRates(handle).gpu
            yield f"{prefix}_power_usage_watts", library.nvmlDeviceGetPowerUsage(handle) / 1000
        except library.NVMLError as error:
            log.debug("GPU %d: %s", index, error)
