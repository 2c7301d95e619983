"""What runs beside a run in its launcher: the look at the machine, the heartbeat, the endpoint.

Nothing is imported that was not asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prl.run_dir import RunDir

if TYPE_CHECKING:
    from prl.monitor.endpoint import Endpoint


@contextlib.contextmanager
def companions(config: Any, run: RunDir) -> Iterator[None]:
    """Start what `tracking.system_seconds` and `monitor` ask for; stop it when the block ends."""
    with contextlib.ExitStack() as stack:
        if config.tracking.system_seconds:
            from prl.tracking.system import SystemMetrics

            system = SystemMetrics(run.path, config.tracking.system_seconds)
            system.start()
            stack.callback(system.close)
        if config.monitor.heartbeat_url:
            from prl.monitor.heartbeat import Heartbeat

            beat = Heartbeat(config.monitor.heartbeat_url, run.path, config.monitor.heartbeat_seconds)
            beat.start()
            stack.callback(beat.close)
        if endpoint := serve_metrics(config, run, "launcher"):
            stack.callback(endpoint.close)
        yield


def serve_metrics(config: Any, run: RunDir, role: str) -> Endpoint | None:
    """Start the endpoint of this process, if `monitor.endpoints` asks for it; the process ends it."""
    monitor = getattr(config, "monitor", None)
    if monitor is None or not monitor.endpoints:
        return None
    from prl.monitor.endpoint import open_endpoint

    return open_endpoint(monitor, run, role)
