"""Names and values of the step metrics, the window behind them, and the warnings."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from orchestrator_fakes import FakeTask, build_sample, make_episode, make_trace

from prl.orchestrator.alerts import Alerts
from prl.orchestrator.episodes import Group
from prl.orchestrator.metrics import batch_metrics, distribution
from prl.orchestrator.mixing import Draw
from prl.orchestrator.sink import Entry
from prl.orchestrator.window import Fact, GroupReport, Window
from prl.records import Episode, PolicySpan


@dataclass
class Arrived:
    """A group with its episodes at hand, as they were before they became facts."""

    env: str
    key: str
    episodes: list[Episode]
    cancelled: int = 0

    def report(self, used: Sequence[str] = ()) -> GroupReport:
        return GroupReport.of(self.env, self.key, self.episodes, self.cancelled, used, used)


def group(env: str, key: str, *rewards: float | str | None, cancelled: int = 0) -> Arrived:
    episodes = [
        make_episode(key, None if isinstance(r, str) else r, env=env, error=r if isinstance(r, str) else None)
        for r in rewards
    ]
    return Arrived(env, key, episodes, cancelled)


def entries(arrived: Arrived, advantage: float = 0.5, span: tuple[int, int] | None = (0, 0)) -> list[Entry]:
    made = []
    for episode in arrived.episodes:
        episode.policy = PolicySpan(*span) if span else None
        for trace in episode.trainable_traces:
            for node in trace.nodes:
                node.advantages = [advantage] * node.num_sampled
            of = Group("1-0", Draw(0, arrived.env, FakeTask(arrived.key)), 2, 0)
            made.append(Entry(of, episode, trace, build_sample(arrived.env, trace)))
    return made


def shipped_and_window(*groups: Arrived, span: tuple[int, int] = (0, 0)) -> tuple[list[Entry], Window]:
    window = Window()
    shipped: list[Entry] = []
    for arrived in groups:
        own = entries(arrived, span=span)
        window.groups.append(arrived.report([entry.trace.id for entry in own]))
        shipped += own
    return shipped, window


def test_a_distribution_interpolates_like_numpy() -> None:
    rng = random.Random(0)
    for size in (1, 2, 3, 10, 128):
        values = [rng.gauss(0, 1) for _ in range(size)]
        found = distribution("x", values)
        expected = {
            "x/mean": np.mean(values), "x/max": max(values), "x/min": min(values),
            "x/p10": np.percentile(values, 10), "x/p90": np.percentile(values, 90),
        }  # fmt: skip
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_an_empty_distribution_has_no_key(values: list[float]) -> None:
    assert distribution("x", values) == {}


def test_the_main_signals() -> None:
    values = batch_metrics(*shipped_and_window(group("a", "a0", 1.0, 0.0), group("b", "b0", 0.5, 0.5)), 1)
    assert values["train/agg/effective/agent/reward/mean"] == 0.5
    assert values["train/a/effective/agent/reward/max"] == 1.0
    assert values["train/b/all/agent/reward/p90"] == 0.5
    assert values["train/agg/all/agent/reward/group_spread/mean"] == 0.25
    assert values["train/a/all/agent/reward/group_spread/mean"] == 0.5
    assert values["batch/a"] == values["batch/b"] == 0.5


def test_counts_are_sums_over_an_episode_and_per_trace_of_an_agent() -> None:
    arrived = group("a", "a0", 1.0)
    arrived.episodes[0].traces.append(make_trace("second", 0.0, sampled=7, agent="other"))
    values = batch_metrics(*shipped_and_window(arrived), 1)
    assert values["train/a/all/num_total_tokens/mean"] == 5 + 9
    assert values["train/a/all/num_output_tokens/mean"] == 3 + 7
    assert values["train/a/all/num_input_tokens/mean"] == 4
    assert values["train/a/all/num_turns/mean"] == values["train/a/all/num_branches/mean"] == 2
    assert values["train/a/all/other/num_output_tokens/max"] == 7
    assert values["train/a/all/agent/num_input_tokens/min"] == 2


def test_failures_and_cancellations_count_only_in_all_and_are_disjoint() -> None:
    shipped, window = shipped_and_window(group("a", "a0", 1.0, "Timeout", "Boom", cancelled=1))
    values = batch_metrics(shipped, window, 1)
    assert values["train/a/all/has_error/mean"] == 0.5 and values["train/a/all/cancelled/mean"] == 0.25
    assert values["train/a/all/agent/error/Timeout"] == values["train/a/all/agent/error/Boom"] == 1
    assert values["train/a/all/agent/reward/mean"] == 1.0, "a failed trace is no zero"
    assert not any("error" in name or "cancelled" in name for name in values if "/effective/" in name)


def test_groups_are_solved_by_none_all_or_some() -> None:
    groups = [group("a", f"a{i}", *r) for i, r in enumerate([(0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.5, 0.5)])]
    values = batch_metrics(*shipped_and_window(*groups), 1)
    assert values["train/a/all/agent/solved_none"] == 0.25
    assert values["train/a/all/agent/solved_all"] == 0.25
    assert values["train/a/all/agent/solved_some"] == 0.5


def test_effective_is_what_was_shipped_even_from_an_earlier_window() -> None:
    old, _ = shipped_and_window(group("a", "a0", 0.25))
    _, window = shipped_and_window(group("a", "a1", 1.0))
    window.groups[0] = group("a", "a1", 1.0).report()
    values = batch_metrics(old, window, 1)
    assert values["train/a/effective/agent/reward/mean"] == 0.25
    assert values["train/a/all/agent/reward/mean"] == 1.0
    assert values["train/a/effective/agent/is_trainable/mean"] == 1.0
    assert values["train/a/all/agent/is_trainable/mean"] == 0.0
    assert values["train/a/all/agent/is_admitted/mean"] == 0.0


def test_tables_stops_and_flags() -> None:
    arrived = group("a", "a0", 1.0, 0.0)
    one, two = (episode.traces[0] for episode in arrived.episodes)
    one.rewards, two.rewards = {"format": 1.0}, {"format": None}
    one.metrics = {"words": 4.0}
    one.timing, two.timing = {"total": 1.0, "agent/model": 0.5}, {"total": 3.0}
    one.is_truncated, one.stop_condition, two.stop_condition = True, "max_turns", None
    values = batch_metrics(*shipped_and_window(arrived), 1)
    base = "train/a/effective/agent"
    assert values[f"{base}/rewards/format/mean"] == 0.5, "an unscored part counts as 0"
    assert values[f"{base}/metrics/words/mean"] == 4.0, "only traces that have the key"
    assert values[f"{base}/timing/total/mean"] == 2.0 and values[f"{base}/timing/agent/model/max"] == 0.5
    assert values[f"{base}/is_truncated/mean"] == 0.5 and values[f"{base}/is_completed/mean"] == 1.0
    assert values[f"{base}/stop_condition/max_turns"] == 1.0
    assert values[f"{base}/stop_condition/generation_truncated"] == 0.5
    one.stop_condition = "prompt_too_long"
    values = batch_metrics(*shipped_and_window(arrived), 1)
    assert values[f"{base}/stop_condition/generation_truncated"] == 0.0


def test_off_policy_ages_and_drops() -> None:
    shipped, window = shipped_and_window(group("a", "a0", 1.0, 0.0), span=(3, 4))
    window.void, window.swept = 2, 3
    values = batch_metrics(shipped, window, 6)
    assert (values["off_policy/max"], values["off_policy/mean"]) == (2, 2)
    assert values["off_policy/in_flight/max"] == values["off_policy/in_queue/mean"] == 1
    assert values["off_policy/dropped"] == 5


def test_frozen_samples_have_no_age() -> None:
    shipped = entries(group("a", "a0", 1.0, 0.0), span=None)
    values = batch_metrics(shipped, Window(), 9)
    assert "off_policy/max" not in values and values["off_policy/dropped"] == 0


def test_p15_progress_counts_true_tokens() -> None:
    shipped, window = shipped_and_window(group("a", "a0", 1.0, "Boom"), group("b", "a0", 0.0))
    window.truncated = 3
    values = batch_metrics(shipped, window, 1)
    assert values["progress/rollouts"] == 3
    assert values["progress/tasks"] == 2, "equal keys of two environments are two tasks"
    assert values["progress/tokens"] == 3 * 5
    assert (values["progress/input_tokens"], values["progress/output_tokens"]) == (4, 6)
    assert values["progress/truncated_samples"] == 3


def test_p15_samples_of_unequal_length_are_counted_each_by_its_own() -> None:
    arrived = [make_episode("a0", 1.0, sampled=count) for count in (1, 4, 7)]
    values = batch_metrics(*shipped_and_window(Arrived("a", "a0", arrived)), 1)
    assert values["progress/tokens"] == 3 + 6 + 9
    assert (values["progress/input_tokens"], values["progress/output_tokens"]) == (6, 12)


def test_every_name_suits_the_tracker() -> None:
    values = batch_metrics(*shipped_and_window(group("a", "a0", 1.0, "Timeout")), 1)
    assert all(isinstance(value, int | float) for value in values.values())
    assert {name.split("/")[0] for name in values} == {"train", "off_policy", "batch", "progress"}


def test_a_window_explains_what_was_discarded() -> None:
    arrived = group("a", "a0", 1.0, 0.0, "Boom", "Boom", "Timeout", cancelled=2)
    window = Window([arrived.report([arrived.episodes[0].traces[0].id])])
    assert window.reasons() == "3 failed (Boom 2, Timeout 1), 1 without credit, 2 cancelled"
    assert window.discarded_share() == pytest.approx(6 / 7)
    assert Window().reasons() == "none discarded" and Window().discarded_share() == 0


def test_reasons_tell_age_from_lack_of_credit() -> None:
    arrived = group("a", "a0", 1.0, 0.0, 0.5, 0.5)
    used = [episode.traces[0].id for episode in arrived.episodes[:2]]
    window = Window([arrived.report(used)], void=1, swept=2)
    assert window.reasons() == "1 without credit, 3 too old"
    assert window.stale == 3 and window.discarded_share() == 1.0


def alerts(it: Alerts, step: int, **changes: Any) -> list[str]:
    values = {"taken": 10, "shipped": 10, "window": Window(), "seconds": 10.0, "blocked": 1.0}
    return it.of(step, **{**values, **changes})


def test_warnings_say_what_is_wrong() -> None:
    failing = Window([group("a", "a0", "Boom", "Boom").report()])
    assert alerts(Alerts(), 1) == []
    (few,) = alerts(Alerts(), 1, shipped=1)
    assert "only 1 of 10 rollouts carry credit" in few
    (discarded,) = alerts(Alerts(), 1, window=failing)
    assert discarded == "100% of the rollouts were discarded: 2 failed (Boom 2)"
    (waiting,) = alerts(Alerts(), 1, blocked=6.0)
    assert waiting == "6.0 of 10.0 s went into waiting for the trainer"


def test_a_warning_is_not_repeated_every_step() -> None:
    it = Alerts()
    said = [step for step in range(1, 25) if alerts(it, step, shipped=0)]
    assert said == [1, 11, 21]
    assert alerts(it, 22, shipped=0, blocked=9.0) != [], "another kind is not held back"


def test_empty_episodes_do_not_break_the_metrics() -> None:
    window = Window([GroupReport("a", "a0", [[]], 0)])
    shipped, _ = shipped_and_window(group("a", "a1", 1.0))
    assert batch_metrics(shipped, window, 1)["train/a/all/has_error/mean"] == 0


def test_a_window_keeps_no_tokens() -> None:
    arrived = group("a", "a0", 1.0)
    (fact,) = arrived.report().facts
    assert fact == Fact.of(arrived.episodes[0].traces[0], trainable=False, admitted=False)
    held = [getattr(fact, name) for name in Fact.__slots__]
    assert not any(
        value is node or value is node.token_ids
        for value in held
        for node in arrived.episodes[0].traces[0].nodes
    )
    assert fact.counts == (5, 2, 3, 1, 1)
