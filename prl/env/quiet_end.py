"""The end of a run is no fault: what a server says of a client that has gone stays out of its log.

A run that is done leaves rollouts behind. Each of them fails to send its answer, with a traceback, to an
orchestrator that has ended, and SIGTERM reaches the server in the middle of one of them.
"""

from __future__ import annotations

import logging

import zmq

LOGGERS = ("verifiers.v1.serve.delta", "verifiers.v1.serve.server", "asyncio")


class QuietEnd(logging.Filter):
    """Leaves out records about an answer that nobody takes, and about SIGTERM in the middle of a task."""

    def filter(self, record: logging.LogRecord) -> bool:
        found: list[object] = [record.exc_info[1]] if record.exc_info else []
        found += list(record.args) if isinstance(record.args, tuple) else []
        return not any(isinstance(error, zmq.ZMQError | KeyboardInterrupt) for error in found)


def stay_quiet_at_the_end() -> None:
    """In this process; a second call changes nothing."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(known, QuietEnd) for known in logger.filters):
            logger.addFilter(QuietEnd())
