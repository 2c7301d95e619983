from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import zmq

from prl.env.quiet_end import LOGGERS, QuietEnd, stay_quiet_at_the_end


@pytest.fixture
def quiet() -> Iterator[None]:
    stay_quiet_at_the_end()
    stay_quiet_at_the_end()
    yield
    for name in LOGGERS:
        logger = logging.getLogger(name)
        assert sum(isinstance(known, QuietEnd) for known in logger.filters) == 1
        logger.filters = [known for known in logger.filters if not isinstance(known, QuietEnd)]


def say(name: str, error: BaseException) -> None:
    try:
        raise error
    except BaseException:
        logging.getLogger(name).warning("failed to send delta for %s", "x", exc_info=True)


@pytest.mark.usefixtures("quiet")
def test_a_client_that_is_gone_is_no_news_and_a_fault_is(caplog: pytest.LogCaptureFixture) -> None:
    delta, server, loop = LOGGERS
    unreachable = zmq.ZMQError(zmq.EHOSTUNREACH)
    say(delta, unreachable)
    logging.getLogger(server).warning("failed to send response: %s", unreachable)
    say(loop, KeyboardInterrupt())
    assert caplog.records == []
    say(delta, ValueError("no such node"))
    logging.getLogger(server).warning("request failed: %s", RuntimeError("boom"))
    logging.getLogger(server).warning("slow")
    assert [record.message for record in caplog.records] == [
        "failed to send delta for x",
        "request failed: boom",
        "slow",
    ]
