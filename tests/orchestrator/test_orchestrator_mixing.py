"""The sequence of draws: by ratio, by seed alone, and continued exactly after a resume."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_fakes import FakeCurriculum

from prl.orchestrator.mixing import Draw, TaskMixer


def mixer(seed: int = 0, **ratios: float) -> TaskMixer:
    ratios = ratios or {"a": 1.0, "b": 1.0}
    return TaskMixer({env: FakeCurriculum(env) for env in ratios}, ratios, seed)


def keys(draws: list[Draw]) -> list[str]:
    return [draw.task.key for draw in draws]


def test_environments_come_in_proportion_to_their_ratio() -> None:
    source = mixer(a=1.0, b=3.0)
    counts = Counter(source.draw().env for _ in range(4000))
    assert 0.72 < counts["b"] / 4000 < 0.78


def test_each_environment_keeps_its_own_order() -> None:
    draws = [draw for source in [mixer()] for draw in (source.draw() for _ in range(50))]
    for env in "ab":
        own = [draw.task.key for draw in draws if draw.env == env]
        assert own == [f"{env}{i}" for i in range(len(own))] and own
    assert [draw.index for draw in draws] == list(range(50))


def test_the_seed_alone_decides() -> None:
    def drawn(seed: int) -> list[str]:
        source = mixer(seed)
        return keys([source.draw() for _ in range(40)])

    assert drawn(1) == drawn(1) != drawn(2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.data())
def test_p16_a_resumed_run_draws_what_it_owes_and_then_goes_on(seed: int, data: st.DataObject) -> None:
    uninterrupted = mixer(seed)
    reference = [uninterrupted.draw() for _ in range(40)]

    first = mixer(seed)
    drawn = [first.draw() for _ in range(data.draw(st.integers(0, 20)))]
    used = data.draw(st.sets(st.sampled_from(range(20))))
    for draw in drawn:
        if draw.index in used:
            first.settle(draw.index)
    saved = json.loads(json.dumps(first.state_dict()))

    resumed = mixer(seed + 1)
    resumed.load_state_dict(saved)
    rest = [resumed.draw() for _ in range(40 - len(used & {d.index for d in drawn}))]
    expected = [d for d in reference if not (d.index < len(drawn) and d.index in used)]
    assert keys(rest)[: len(expected)] == keys(expected)
    assert [d.index for d in rest[: len(expected)]] == [d.index for d in expected]
    assert [d.task.data for d in rest[: len(expected)]] == [d.task.data for d in expected]


def test_owed_draws_stay_owed_until_they_are_used_up() -> None:
    source = mixer()
    draws = [source.draw() for _ in range(4)]
    source.settle(draws[1].index)
    resumed = mixer()
    resumed.load_state_dict(source.state_dict())
    resumed.draw()
    again = mixer()
    again.load_state_dict(resumed.state_dict())
    assert keys([again.draw() for _ in range(3)]) == keys([draws[0], draws[2], draws[3]])


def test_state_of_other_environments_is_refused() -> None:
    with pytest.raises(ValueError, match=r"checkpoint is of env \['a', 'b'\], this run has \['a'\]"):
        mixer(a=1.0).load_state_dict(mixer(a=1.0, b=1.0).state_dict())


def test_settling_twice_is_harmless() -> None:
    source = mixer()
    draw = source.draw()
    source.settle(draw.index)
    source.settle(draw.index)
    assert source.state_dict()["pending"] == []
