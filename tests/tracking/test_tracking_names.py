from __future__ import annotations

import json
import posixpath
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.tracking.names import MAX_LENGTH, MetricNames, safe_name


def accepted(name: str) -> bool:
    """The tracker's own rules, written down independently: characters, a path that is normal, length."""
    normal = posixpath.normpath(name)
    return (
        bool(re.match(r"^[/\w.\- :]*$", name))
        and normal == name
        and normal != "."
        and not name.startswith(("..", "/"))
        and len(name) <= 250
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/agg/effective/agent/reward/mean", "train/agg/effective/agent/reward/mean"),
        ("eval/gsm8k/effective/agent/avg@4", "eval/gsm8k/effective/agent/avg_at_4"),
        ("pass^2", "pass_hat_2"),
        ("loss(x)[0]", "loss_x__0_"),
        ("a=b", "a_b"),
        ("80%", "80_"),
        ("vllm:rate", "vllm:rate"),
        ("/a//b/", "a/b"),
        ("./a", "_/a"),
        ("a/../b", "a/__/b"),
        ("..a/b", "__a/b"),
        ("..", "__"),
        ("", "_"),
        ("///", "_"),
        ("größe/λ", "größe/λ"),
        ("line\nbreak", "line_break"),
    ],
)
def test_the_documented_names(name: str, expected: str) -> None:
    assert safe_name(name) == expected and accepted(expected)


@given(st.text(alphabet="ab@^/.[]()%= λß-:\n\x00", max_size=300))
def test_any_text_becomes_a_name_that_is_accepted(name: str) -> None:
    assert accepted(safe_name(name))


@given(st.lists(st.text(alphabet="ab@_/.[]", max_size=6), unique=True, max_size=20))
def test_different_metrics_never_share_a_name(keys: list[str]) -> None:
    names = MetricNames()
    mapped = [names.of("trainer", key) for key in keys]
    assert len(set(mapped)) == len(keys) and all(map(accepted, mapped))
    assert [names.of("trainer", key) for key in keys] == mapped, "and keep the one they have"


def test_long_names_keep_their_beginning_and_stay_apart() -> None:
    first, second = safe_name("x" * 300 + "a"), safe_name("x" * 300 + "b")
    assert first != second and len(first) == MAX_LENGTH and first.startswith("x" * 241 + "_")


def test_each_producer_has_its_own_times() -> None:
    names = MetricNames()
    assert names.of("trainer", "time/step") == "trainer/time/step"
    assert names.of("orchestrator", "time/step") == "orchestrator/time/step"


def test_a_second_producer_of_a_name_is_prefixed() -> None:
    names = MetricNames()
    assert names.of("orchestrator", "progress/step") == "progress/step"
    assert names.of("trainer", "progress/step") == "trainer/progress/step"
    assert names.of("orchestrator", "progress/step") == "progress/step"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text("a@_t/", max_size=5)), unique=True, max_size=12))
def test_names_hold_over_a_resume_in_another_order(metrics: list[tuple[str, str]]) -> None:
    names = MetricNames()
    given_first = {metric: names.of(*metric) for metric in metrics[: len(metrics) // 2]}
    again = MetricNames(json.loads(json.dumps(names.known)))
    given_then = {metric: again.of(*metric) for metric in reversed(metrics)}
    assert given_then | given_first == given_then
    assert len(set(given_then.values())) == len(metrics)


def test_a_prefixed_name_does_not_take_over_one_that_is_written_so() -> None:
    names = MetricNames()
    literal = names.of("orchestrator", "trainer/time/step")
    assert literal == "trainer/time/step" and names.of("trainer", "time/step") not in (literal, "time/step")


def test_mlflow_takes_every_name() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for name in ("avg@4", "a//b", "./a", "../../x", "[0]", "(a)", "x=1%", "..a", "a/./b", "\t", "a" * 400):
        _validate_metric_name(safe_name(name))
