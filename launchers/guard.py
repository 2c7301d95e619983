"""`python -m launchers.guard`: outlives the launcher by moments and ends the run's processes after it.

A launcher that is killed with SIGKILL cannot clean up. The guard waits on a pipe whose other end only the
launcher holds; the kernel closes it however the launcher ends, and the guard kills what is left of the run.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1):
        pass
    # Only now: the guard must be as small as an interpreter can be while the run lives.
    from launchers.processes import FAMILY_VAR, kill_family

    left = kill_family(os.environ[FAMILY_VAR])
    if left:
        print(f"still alive: {sorted(process.pid for process in left)}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
