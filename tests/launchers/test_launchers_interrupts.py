from __future__ import annotations

import os
import signal

import pytest

from launchers.interrupts import SIGNALS, Interrupts


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_becomes_a_request(signum: int) -> None:
    before = signal.signal(signum, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with Interrupts() as interrupts:
            assert interrupts.signum is None and not interrupts.urgent
            os.kill(os.getpid(), signum)
            assert (interrupts.signum, interrupts.count, interrupts.urgent) == (signum, 1, False)
    finally:
        signal.signal(signum, before)


def test_the_first_signal_gives_the_reason_and_the_second_the_urgency() -> None:
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        more = interrupts.since_now()
        assert not more()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.signum == signal.SIGTERM and interrupts.urgent and more()


def test_handlers_are_given_back() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with pytest.raises(RuntimeError), Interrupts():
        assert [signal.getsignal(signum) for signum in SIGNALS] != before
        raise RuntimeError
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_nohup_stays_in_force_and_ctrl_c_always_works() -> None:
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGHUP, signal.SIGINT)}
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.signum is None
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupts.signum == signal.SIGINT
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
