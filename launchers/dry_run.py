"""What a dry run tells: every process's configuration, the placement, and the memory that it takes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launchers.placement import Role, format_table
from prl.config.load import dump_resolved
from prl.config.memory import GB, memory_report

CLOSING = "dry run: nothing was started, nothing was written"


def configuration(command: str, config: Any) -> str:
    """The resolved configuration: one file, `configs/attempt_n/resolved.yaml`, that every process reads."""
    return f"--- resolved config of every process\n{dump_resolved(command, config)}--- plan"


def placement_report(config: Any, roles: Sequence[Role]) -> str:
    """Which process runs where with which variables, and what that takes of each device."""
    return "\n".join(["--- placement", format_table(roles), "--- memory", memory(config, roles), CLOSING])


def memory(config: Any, roles: Sequence[Role]) -> str:
    """The memory estimate of placed roles, against the devices of this machine or of the cluster's nodes."""
    remote = config.cluster.name != "local"
    gpu = _gpu_bytes(config, remote) if any(role.devices for role in roles) else None
    host = getattr(config.cluster, "mem_gb", None) if remote else host_bytes() / GB
    return memory_report(config, roles, gpu, None if host is None else host * GB)


def host_bytes(proc: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """Memory of this machine, or what its control group leaves us, if less. Raises OSError outside Linux."""
    total = next(line for line in proc.read_text().splitlines() if line.startswith("MemTotal"))
    size = float(total.split()[1]) * 1024
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return size if allowed == "max" else min(size, float(allowed))


def _gpu_bytes(config: Any, remote: bool) -> float | None:
    if config.cluster.gpu_gb is not None:
        return float(config.cluster.gpu_gb) * GB
    return None if remote else driver_bytes()


def driver_bytes(library: str = "libnvidia-ml.so.1") -> float | None:
    """Memory of the smallest GPU as the driver tells; None without a driver. CUDA is not started."""

    class Memory(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    count, sizes = ctypes.c_uint(), []
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), Memory()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
            sizes.append(float(memory.total))
    nvml.nvmlShutdown()
    return min(sizes, default=None)
