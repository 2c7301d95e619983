from __future__ import annotations

import pytest

from prl.trainer.main import waited_mostly


@pytest.mark.parametrize(("waited", "said"), [(1.0, False), (1.5, False), (1.6, True)])
def test_a_step_that_mostly_waited_is_told(waited: float, said: bool) -> None:
    text = waited_mostly({"time/wait_for_batch": waited, "time/step": 3.0})
    assert (text is not None) is said
    assert not said or text == "1.6 of 3.0 s went into waiting for rollouts; inference is the bottleneck"
