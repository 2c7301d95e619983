"""Samplers, gates, and the curriculum that joins them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass

import pytest

from prl.config.curriculum import (
    AdvantageRangeConfig,
    DifficultyPoolConfig,
    PoolConfig,
    StandardConfig,
)
from prl.curriculum import build_curriculum
from prl.records import Episode, Node, Trace, TraceError


@dataclass(frozen=True)
class Problem:
    key: str


def problems(*keys: str) -> list[Problem]:
    return [Problem(key) for key in keys]


def build(config=None, tasks=None, endless=False):
    tasks = tasks or problems(*"abcd")
    return build_curriculum(config or StandardConfig(), env="gsm8k", tasks=tasks, endless=endless)


def draw(curriculum, count) -> str:
    return "".join(curriculum.draw().key for _ in range(count))


def saved(curriculum):
    """State as it comes back from a file."""
    return json.loads(json.dumps(curriculum.state_dict()))


def scored(*advantages: float | None) -> list[Episode]:
    """A group with one trace per advantage; None leaves the trace unscored."""
    group = []
    for value in advantages:
        node = Node(None, "assistant", True, [1, 2], [True, True], [-1.0, -1.0])
        node.advantages = None if value is None else [value, value]
        trace = Trace(id="t", agent="agent", nodes=[node], branches=[[0]], reward=1.0)
        group.append(Episode("e", "gsm8k", "g", "a", {}, [trace]))
    return group


# --- standard ---------------------------------------------------------------------------------------


def test_standard_cycles_through_a_finite_set():
    assert draw(build(), 9) == "abcdabcda"


def test_standard_goes_on_where_it_was_saved():
    first = build()
    draw(first, 6)
    resumed = build()
    resumed.load_state_dict(saved(first))
    assert draw(resumed, 4) == draw(first, 4) == "cdab"


def test_standard_restores_into_a_smaller_set():
    first = build()
    draw(first, 7)
    resumed = build(tasks=problems("x", "y", "z"))
    resumed.load_state_dict(saved(first))
    assert draw(resumed, 2) == "yz"


def test_an_endless_stream_is_consumed_up_to_the_saved_place():
    def stream():
        return (Problem(str(i % 10)) for i in itertools.count())

    first = build(tasks=stream(), endless=True)
    assert draw(first, 13) == "0123456789012"
    resumed = build(tasks=stream(), endless=True)
    resumed.load_state_dict(saved(first))
    assert draw(resumed, 3) == "345"


def test_rewards_do_not_change_the_standard_order():
    curriculum = build()
    curriculum.sampler.observe("a", 1.0)
    assert draw(curriculum, 4) == "abcd"


@pytest.mark.parametrize("config", [StandardConfig(), DifficultyPoolConfig()])
def test_tasks_need_keys_of_their_own(config):
    with pytest.raises(ValueError, match=r"env\.gsm8k: task keys must be unique; 1 are not, such as 'b'"):
        build(config, problems("a", "b", "b"))


def test_an_empty_set_is_refused():
    with pytest.raises(ValueError, match=r"env\.gsm8k has no task"):
        build_curriculum(StandardConfig(), env="gsm8k", tasks=[], endless=False)


# --- difficulty_pool --------------------------------------------------------------------------------


def test_bounds_are_inclusive_and_the_last_pool_takes_the_rest():
    curriculum = build(DifficultyPoolConfig(), problems(*"abcdefg"))
    for key, reward in zip("abcdef", [-1.0, 0.25, 0.26, 0.75, 1.0, 3.0], strict=True):
        curriculum.sampler.observe(key, reward)
    assert curriculum.metrics() == {
        "curriculum/gsm8k/sampler/pool/unseen": 1,
        "curriculum/gsm8k/sampler/pool/hard": 2,
        "curriculum/gsm8k/sampler/pool/normal": 2,
        "curriculum/gsm8k/sampler/pool/easy": 2,
    }


def test_the_latest_group_decides():
    curriculum = build(DifficultyPoolConfig(), problems("a"))
    curriculum.sampler.observe("a", 0.0)
    curriculum.sampler.observe("a", 1.0)
    pools = curriculum.metrics()
    assert pools["curriculum/gsm8k/sampler/pool/hard"] == 0
    assert pools["curriculum/gsm8k/sampler/pool/easy"] == 1


def test_tasks_are_drawn_by_the_weight_of_their_pool():
    curriculum = build(DifficultyPoolConfig(unseen_weight=1), problems(*"hneu"))
    for key, reward in {"h": 0.0, "n": 0.5, "e": 1.0}.items():
        curriculum.sampler.observe(key, reward)
    counts = Counter(draw(curriculum, 24_000))
    shares = {key: counts[key] / 24_000 for key in "hneu"}
    expected = {"h": 0.2 / 2.4, "n": 1 / 2.4, "e": 0.2 / 2.4, "u": 1 / 2.4}
    assert shares == pytest.approx(expected, abs=0.015)  # 4.7 standard deviations of the largest


def test_difficulty_pool_goes_on_where_it_was_saved():
    first = build(DifficultyPoolConfig())
    draw(first, 5)
    first.sampler.observe("a", 0.0)
    first.sampler.observe("b", 0.5)
    resumed = build(DifficultyPoolConfig())
    resumed.load_state_dict(saved(first))
    assert draw(resumed, 50) == draw(first, 50)


def test_the_seed_decides_the_draw():
    draws = [draw(build(DifficultyPoolConfig(seed=seed)), 40) for seed in (42, 42, 7)]
    assert draws[0] == draws[1] != draws[2]


def test_rewards_of_tasks_that_are_gone_are_forgotten():
    first = build(DifficultyPoolConfig())
    first.sampler.observe("d", 1.0)
    resumed = build(DifficultyPoolConfig(), problems("a", "b"))
    resumed.load_state_dict(saved(first))
    assert resumed.metrics()["curriculum/gsm8k/sampler/pool/unseen"] == 2
    assert set(draw(resumed, 20)) == {"a", "b"}


def test_no_task_with_weight_is_an_error_when_it_happens():
    pools = {"all": PoolConfig(max_reward=1.0, weight=0.0)}
    curriculum = build(DifficultyPoolConfig(pools=pools, unseen_weight=1.0), problems("a"))
    assert draw(curriculum, 2) == "aa"
    curriculum.sampler.observe("a", 0.5)
    with pytest.raises(RuntimeError, match="all 1 tasks are in curriculum pools of weight 0"):
        curriculum.draw()


@pytest.mark.parametrize(
    ("config", "endless", "message"),
    [
        (DifficultyPoolConfig(pools={}), False, "different max_reward"),
        (
            DifficultyPoolConfig(pools={"x": PoolConfig(max_reward=0.5), "y": PoolConfig(max_reward=0.5)}),
            False,
            r"different max_reward values, got \[0\.5, 0\.5\]",
        ),
        (
            DifficultyPoolConfig(pools={"x": PoolConfig(max_reward=0.5, weight=0)}, unseen_weight=0),
            False,
            "at least one weight must be positive",
        ),
        (DifficultyPoolConfig(), True, r"env\.gsm8k has no end; choose curriculum=standard"),
        (
            StandardConfig(gates={"flat": AdvantageRangeConfig(reject_min=0.1, reject_max=0.0)}),
            False,
            r"curriculum\.gates\.flat: reject_min=0\.1 > reject_max=0\.0",
        ),
    ],
)
def test_settings_that_cannot_work_say_why(config, endless, message):
    tasks = iter(problems("a")) if endless else problems("a")
    with pytest.raises(ValueError, match=message):
        build(config, tasks, endless)


def test_a_group_teaches_the_mean_reward_of_its_trainable_traces():
    curriculum = build(DifficultyPoolConfig())
    group = scored(0.1, 0.2, 0.3)
    for episode, reward in zip(group, (1.0, 0.0, 0.0), strict=True):
        episode.traces[0].reward = reward
    group[2].traces[0].error = TraceError("Timeout")
    curriculum.admit(group)
    assert saved(curriculum)["task_rewards"] == {"a": 0.5}


def test_a_group_without_trainable_traces_teaches_nothing():
    curriculum = build(DifficultyPoolConfig())
    group = scored(None)
    group[0].traces[0].reward = None
    assert curriculum.admit(group) is True
    assert saved(curriculum)["task_rewards"] == {}


@pytest.mark.parametrize("key", ["b", ""])
def test_a_group_is_of_one_task(key):
    group = scored(0.1, 0.2)
    group[1].task_key = key
    with pytest.raises(ValueError, match=r"a group of env\.gsm8k must have one task key"):
        build().admit(group)


# --- gates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "advantages", "admitted"),
    [
        (0.0, 0.0, (0.0, 0.0), False),
        (0.0, 0.0, (0.0, 1e-9), True),
        (-0.2, 0.3, (-0.2, 0.3), False),
        (-0.2, 0.3, (-0.2, 0.31), True),
        (-0.2, 0.3, (-0.21, 0.0), True),
        (-0.2, 0.3, (None, 0.1), False),
        (-0.2, 0.3, (None, None), True),
    ],
)
def test_advantage_range_rejects_a_group_that_lies_inside(low, high, advantages, admitted):
    curriculum = build(StandardConfig(gates={"range": AdvantageRangeConfig(low, high)}))
    assert curriculum.admit(scored(*advantages)) is admitted


def test_the_gate_looks_at_trainable_traces_only():
    group = scored(0.0, 0.5)
    group[1].traces[0].error = TraceError("Timeout")
    assert build(StandardConfig(gates={"flat": AdvantageRangeConfig()})).admit(group) is False


def test_without_gates_every_group_is_trained():
    assert build().admit(scored(0.0, 0.0)) is True


def test_rates_are_those_of_the_groups_since_the_last_call():
    gates = {"flat": AdvantageRangeConfig(), "weak": AdvantageRangeConfig(-0.2, 0.2)}
    curriculum = build(StandardConfig(gates=gates))
    assert curriculum.metrics() == {"curriculum/gsm8k/sampler/cursor": 0}
    assert [curriculum.admit(scored(a)) for a in (0.0, 0.1, 0.5, 0.1)] == [False, False, True, False]
    assert curriculum.metrics() == {
        "curriculum/gsm8k/sampler/cursor": 0,
        "curriculum/gsm8k/admission_rate": 0.25,
        "curriculum/gsm8k/gate/flat/admission_rate": 0.75,
        "curriculum/gsm8k/gate/weak/admission_rate": 0.25,
    }
    assert "curriculum/gsm8k/admission_rate" not in curriculum.metrics()
