"""What the algorithms ask of their environments: demonstrations, a tool's words, seats, legal moves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from prl.algo import build_algorithm
from prl.config.algo import RaeConfig
from prl.config.sources import EnvConfig
from prl.env.environment import environment_config
from prl.env.tasksets import kuhn_poker
from prl.env.tasksets.arithmetic import ArithmeticConfig, ArithmeticTaskset
from prl.env.tasksets.checked_reverse import CheckedReverseTaskset
from prl.env.tasksets.reverse_text import ReverseTextConfig, ReverseTextTaskset
from prl.records import Episode, Node, Trace


@pytest.mark.parametrize(
    "taskset",
    [
        ReverseTextTaskset(ReverseTextConfig(num_tasks=5)),
        ArithmeticTaskset(ArithmeticConfig(num_tasks=5)),
        CheckedReverseTaskset(ReverseTextConfig(num_tasks=5)),
    ],
)
def test_every_task_demonstrates_the_reply_that_earns_all(taskset) -> None:
    tasks = list(taskset)
    assert len(tasks) == 5
    assert [task.data.demonstration for task in tasks] == [f"[{task.data.answer}]" for task in tasks]


def test_both_tries_are_scored_and_a_missing_one_is_worth_nothing() -> None:
    (task,) = CheckedReverseTaskset(ReverseTextConfig(num_tasks=1))
    good = task.data.demonstration

    def scores(*replies: str) -> tuple[float, float]:
        return task.scores(SimpleNamespace(assistant_messages=[SimpleNamespace(content=r) for r in replies]))

    assert scores(good, good) == (1.0, 1.0)
    assert scores("huh", good) == (0.0, 1.0)
    assert scores(good) == (1.0, 0.0) and scores() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("reply", "moves", "move", "legality"),
    [
        ("[b]", [], "bet", 1.0),
        ("[bet]", [], "bet", 1.0),
        ("[c]", ["bet"], "call", 1.0),
        ("[f]", ["pass", "bet"], "fold", 1.0),
        ("[b]", ["bet"], "fold", 0.2),
        ("[]", [], "pass", 0.2),
        ("bet", [], "pass", 0.0),
        ("", ["bet"], "fold", 0.0),
    ],
)
def test_a_move_is_a_word_or_its_letter_in_brackets(
    reply: str, moves: list[str], move: str, legality: float
) -> None:
    assert kuhn_poker.parse_move(reply, moves) == move
    assert kuhn_poker.legality(reply, moves) == legality


def test_declared_seats_are_those_of_the_environment() -> None:
    environment_config("kuhn_poker", EnvConfig(seats=["player1", "player0"]), 0)
    with pytest.raises(ValueError, match=r"env\.kuhn_poker\.seats=\['a'\], but its agents are player0"):
        environment_config("kuhn_poker", EnvConfig(seats=["a"]), 0)


def test_rae_shows_its_baselines() -> None:
    rae = build_algorithm(RaeConfig(decay=0.5), env="e")
    assert rae.metrics() == {}
    node = Node(parent=None, role="assistant", sampled=True, token_ids=[1], mask=[True], logprobs=[-1.0])
    trace = Trace("t", "player0", nodes=[node], branches=[[0]], reward=1.0, num_turns=1)
    asyncio.run(rae.score_group([Episode("i", "e", "g", "k", {}, [trace])]))
    assert rae.metrics() == {"baseline/player0": 0.5}
