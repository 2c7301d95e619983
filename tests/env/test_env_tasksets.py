"""What the shipped tasksets ask, and what they pay."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from pydantic import ValidationError

from prl.env.plugins import register_taskset
from prl.env.tasksets import kuhn_poker, proposer_solver
from prl.env.tasksets._brackets import BracketData, BracketTask, bracket_reward, positional_match
from prl.env.tasksets.arithmetic import ArithmeticConfig, ArithmeticTaskset
from prl.env.tasksets.reverse_text import ReverseTextConfig, ReverseTextTaskset


@pytest.mark.parametrize(
    ("answer", "text", "finished", "reward"),
    [
        ("cba", "[cba]", True, 1.0),
        ("cba", "[cba]", False, 0.5),
        ("cba", "[cbx]", True, 0.2 + 0.8 * 2 / 3),
        ("cba", "[cbax]", True, 0.2 + 0.8 * 3 / 4),
        ("cba", "[]", True, 0.2),
        ("cba", "cba", True, 0.0),
        ("cba", "[cba] ", True, 0.0),
        ("cba", "[cba", False, 0.0),
        ("cba", "[", True, 0.0),
        ("cba", "", True, 0.0),
        ("cba", "[" + "cba" * 100 + "]", True, 0.2 + 0.8 * 3 / 300),
    ],
)
def test_bracket_reward(answer: str, text: str, finished: bool, reward: float) -> None:
    assert bracket_reward(answer, text, finished) == pytest.approx(reward)


def test_positional_match_of_nothing_is_nothing() -> None:
    assert positional_match("", "") == 0.0


def test_rewards_never_leave_the_unit_interval() -> None:
    for text in map("".join, itertools.product("[]ab", repeat=5)):
        assert 0.0 <= bracket_reward("ab", text, True) <= 1.0


def trace_of(text: str | None, truncated: bool = False) -> Any:
    messages = [] if text is None else [SimpleNamespace(content=text)]
    return SimpleNamespace(assistant_messages=messages, is_truncated=truncated)


@pytest.mark.parametrize(
    ("text", "truncated", "expected"),
    [
        ("[ba]", False, (1.0, 1.0, 1.0)),
        ("[ba]", True, (0.5, 1.0, 0.0)),
        ("ba", False, (0.0, 0.0, 0.0)),
        ("", False, (0.0, 0.0, 0.0)),
        (None, False, (0.0, 0.0, 0.0)),
    ],
)
def test_bracket_task_scores_the_last_reply(
    text: str | None, truncated: bool, expected: tuple[float, float, float]
) -> None:
    task, trace = BracketTask(BracketData(prompt="reverse ab", answer="ba")), trace_of(text, truncated)

    async def scores() -> tuple[float, float, float]:
        return await task.answer_in_brackets(trace), await task.formatted(trace), await task.exact(trace)

    assert asyncio.run(scores()) == expected


def first(taskset: Any, n: int) -> list[tuple[str, str]]:
    return [(task.data.prompt, task.data.answer) for task in itertools.islice(taskset, n)]


def test_reverse_text_is_seeded_endless_and_right() -> None:
    taskset = ReverseTextTaskset(ReverseTextConfig(id="reverse_text", seed=3))
    assert not taskset.bounded
    tasks = first(taskset, 500)
    assert tasks == first(ReverseTextTaskset(ReverseTextConfig(id="reverse_text", seed=3)), 500)
    assert tasks != first(ReverseTextTaskset(ReverseTextConfig(id="reverse_text", seed=4)), 500)
    for prompt, answer in tasks:
        verb, word = prompt.split(" ")
        assert verb == "reverse" and word == answer[::-1] and word.islower() and word.isascii()
    assert {len(answer) for _, answer in tasks} == set(range(3, 9))


def test_arithmetic_adds_up() -> None:
    taskset = ArithmeticTaskset(ArithmeticConfig(id="arithmetic", digits=2, num_tasks=300))
    assert taskset.bounded
    tasks = first(taskset, 1000)
    assert len(tasks) == 300
    for prompt, answer in tasks:
        assert prompt.startswith("add ")
        a, b = prompt.removeprefix("add ").split("+")
        assert int(a) + int(b) == int(answer) and max(int(a), int(b)) < 100
    assert max(len(prompt) for prompt, _ in tasks) == len("add 10+10")


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_length"):
        ReverseTextConfig(id="reverse_text", min_length=5, max_length=4)
    with pytest.raises(ValidationError, match="digits"):
        ArithmeticConfig(id="arithmetic", digits=0)


@pytest.mark.parametrize("name", ["arithmetic", "kuhn_poker", "proposer_solver", "reverse_text"])
def test_generated_tasks_are_unique_reproducible_and_serialisable(name: str) -> None:
    register_taskset(name)
    config = vf.resolve_env_config({"taskset": {"id": name}}).taskset
    tasks = list(itertools.islice(vf.load_taskset(config), 50))
    again = list(itertools.islice(vf.load_taskset(config), 50))
    assert len({task.key for task in tasks}) == 50
    assert [task.key for task in tasks] == [task.key for task in again]
    for task in tasks:
        assert type(task.data).model_validate(task.data.model_dump(mode="json")) == task.data


KUHN = [
    ("KJ", ["pass", "pass"], 1.0),
    ("JK", ["pass", "pass"], -1.0),
    ("QK", ["bet", "fold"], 1.0),
    ("QK", ["bet", "call"], -2.0),
    ("QJ", ["bet", "call"], 2.0),
    ("KQ", ["pass", "bet", "fold"], -1.0),
    ("KQ", ["pass", "bet", "call"], 2.0),
]


@pytest.mark.parametrize(("cards", "moves", "won"), KUHN)
def test_kuhn_poker_pays_the_winner(cards: str, moves: list[str], won: float) -> None:
    assert not any(kuhn_poker.is_over(moves[:k]) for k in range(len(moves)))
    assert kuhn_poker.is_over(moves)
    assert kuhn_poker.chips_won(cards, moves) == won


def test_kuhn_poker_has_five_endings_and_zero_value_for_equal_play() -> None:
    def endings(moves: list[str]) -> list[list[str]]:
        if kuhn_poker.is_over(moves):
            return [moves]
        return [end for move in kuhn_poker.legal_moves(moves) for end in endings([*moves, move])]

    assert sorted(endings([])) == sorted(
        [["pass", "pass"], ["pass", "bet", "fold"], ["pass", "bet", "call"], ["bet", "fold"], ["bet", "call"]]
    )
    deals = itertools.permutations("JQK", 2)
    assert sum(kuhn_poker.chips_won("".join(deal), ["pass", "pass"]) for deal in deals) == 0.0


def test_kuhn_poker_reads_moves() -> None:
    assert kuhn_poker.prompt("K", ["pass", "bet"]) == "poker K opponent bet [fold] [call]"
    assert kuhn_poker.parse_move("[bet]", []) == "bet"
    assert kuhn_poker.parse_move("[bet]", ["bet"]) == "fold"
    assert kuhn_poker.parse_move("bet", []) == "pass"


@pytest.mark.parametrize(("solved", "reward"), [(0.5, 1.0), (0.0, 0.0), (1.0, 0.0), (0.75, 0.5)])
def test_the_proposer_is_paid_for_words_that_are_half_solved(solved: float, reward: float) -> None:
    assert proposer_solver.challenge(solved) == reward


@pytest.mark.parametrize(
    ("text", "word"),
    [("[abcd]", "abcd"), ("abcd", None), ("[ab]", None), ("[ab1d]", None), ("[abcdefghi]", None)],
)
def test_a_proposal_is_a_bracketed_word(text: str, word: str | None) -> None:
    assert proposer_solver.proposed_word(text) == word
