"""`prl inference`: engines, and a router before them where there are several, until somebody stops them."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
from typing import Any

from launchers.dry_run import configuration, placement_report
from launchers.interrupts import Interrupts
from launchers.local import Outcome, supervise
from launchers.placement import place, visible_gpus
from launchers.run import REFUSED, launcher_log
from launchers.run_directory import append_status, open_run, plan_by_name
from launchers.summary import failure_report
from prl.run_dir import RunDir
from prl.tracking.terminal import announce

LOOK_SECONDS = 0.2


class UntilStopped:
    """A server has no job whose end would be its own."""

    def verdict(self) -> Outcome | None:
        return None

    def finished(self) -> bool:
        return False


def launch_inference(config: Any, command_line: str | list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM; the exit code: 0 when stopped, 1 when an engine died, 2 refused."""
    words = shlex.split(command_line) if isinstance(command_line, str) else command_line
    try:
        plan = plan_by_name(config)
        gpus = visible_gpus(os.environ)
        roles = place("inference", config, RunDir(plan.path).resolved_config, gpus)
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if config.dry_run:
        print(configuration("inference", config), placement_report(config, roles), sep="\n")
        return 0
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        try:
            run = stack.enter_context(open_run("inference", config, plan, words))
        except (ValueError, OSError) as error:
            print(error, file=sys.stderr)
            return REFUSED
        stack.enter_context(launcher_log(run, config.log))
        append_status(run, "started", ["server"])
        roles = place("inference", config, run.resolved_config, gpus)
        announce(config.log, f"starting {', '.join(role.name for role in roles)}; logs in {run.logs}")
        stack.enter_context(_telling_the_address(config, run))
        outcome = supervise(roles, run, config.cluster.grace, interrupts, peers=UntilStopped())
        append_status(run, f"ended: {outcome.status}", [outcome.reason])
    if outcome.status == "FAILED":
        announce(config.log, failure_report(outcome, run), sys.stderr)
        return outcome.code
    return 0


@contextlib.contextmanager
def _telling_the_address(config: Any, run: RunDir) -> Any:
    """Print the URL once it is answered."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(LOOK_SECONDS):
            if run.address_file("inference").exists():
                address = run.wait_for_address_blocking("inference", 1.0)
                announce(config.log, f"serving {config.model.name} on {address}/v1")
                return

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2.0)
