"""The tasksets that ship offline, each played whole: real environment, scripted endpoint."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from chat_engine import ChatEngine, Reply

from prl.config.sources import EnvConfig
from prl.env.environment import environment_config
from prl.env.tasksets import _island, alphabet_sort, wiki_search, word_guess, word_problems
from prl.env.tasksets import reasoning_gym as reasoning_gym_taskset

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine() -> Iterator[ChatEngine]:
    engine = ChatEngine(lambda _: "")
    yield engine
    engine.stop()


def play(
    engine: ChatEngine,
    name: str,
    answer: Callable[[list[dict[str, Any]]], Reply],
    count: int = 3,
    **options: Any,
) -> list[tuple[Any, Any]]:
    """(task data, trace) of the first `count` tasks."""
    engine.answer = answer
    config = environment_config(name, EnvConfig(taskset=options), seed=0)
    tasks = list(vf.load_taskset(config.taskset).take(count))
    context = vf.ModelContext(
        model="chat",
        client=vf.EvalClientConfig(base_url=engine.base_url, api_key_var="NONE"),
        sampling=vf.SamplingConfig(),
    )

    async def run() -> list[Any]:
        env = vf.load_environment(config)
        async with env.serving():
            return [await env.run_episode(task, context) for task in tasks]

    episodes = asyncio.run(run())
    for episode in episodes:
        assert episode.ok, episode.errors
    return [(task.data, episode.traces[0]) for task, episode in zip(tasks, episodes, strict=True)]


# the generated single-answer tasks


def reversed_word(messages: list[dict[str, Any]]) -> str:
    word = next(m["content"] for m in messages if m["role"] == "user").split()[-1]
    return f"[{word[::-1]}]"


def sum_of_two(messages: list[dict[str, Any]]) -> str:
    return f"[{sum(map(int, re.findall(r'[0-9]+', messages[-1]['content'])))}]"


@pytest.mark.parametrize(
    ("name", "answer"),
    [("reverse_text", reversed_word), ("arithmetic", sum_of_two), ("checked_reverse", reversed_word)],
)
def test_a_perfect_answerer_earns_all_and_a_bad_one_nothing(
    engine: ChatEngine, name: str, answer: Callable[[list[dict[str, Any]]], Reply]
) -> None:
    assert [trace.reward for _, trace in play(engine, name, answer, 2)] == [1.0, 1.0]
    assert [trace.reward for _, trace in play(engine, name, lambda _: "no idea", 2)] == [0.0, 0.0]


# word_problems


def solve(question: str) -> int:
    """The story's arithmetic, read from its sentences."""
    count = 0
    for sentence in question.split(". "):
        numbers = [int(number) for number in re.findall(r"\d+", sentence)]
        match sentence.split():
            case [_, "has", *_]:
                count = numbers[0]
            case [_, "brings", *_]:
                count += numbers[0]
            case [_, "of", "them", "get", *_]:
                count -= numbers[0]
            case ["Then", *_]:
                count += numbers[0] * numbers[1]
            case ["Half", *_]:
                count //= 2
            case [_, "gives", *_]:
                count *= 2
    return count


def test_stories_add_up() -> None:
    rng = random.Random(3)
    for _ in range(200):
        question, answer = word_problems.story(rng, rng.randint(1, 6), 20)
        assert solve(question) == answer >= 0, question


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7\n#### 7", 7),
        ("#### 1,200", 1200),
        ("so \\boxed{12} of 40", 12),
        ("it is 12, no, 13", 13),
        ("#### 5 then 6", 5),
        ("#### -3", -3),
        ("$12.00", 12),
        ("it is 12. Then 5.", 5),
        ("#### 3.5", None),
        ("between 3 and 12.5", None),
        ("9" * 5000, None),
        ("none", None),
    ],
)
def test_final_numbers(text: str, number: int | None) -> None:
    assert word_problems.final_number(text) == number


def test_word_problems_pay_for_the_right_number(engine: ChatEngine) -> None:
    right = play(engine, "word_problems", lambda m: f"Step by step.\n#### {solve(m[-1]['content'])}")
    wrong = play(engine, "word_problems", lambda m: f"#### {solve(m[-1]['content']) + 1}", count=2)
    assert [trace.reward for _, trace in right] == [1.0] * 3 and [trace.reward for _, trace in wrong] == [
        0.0
    ] * 2
    assert right[0][1].metrics["has_marker"] == 1.0


# word_guess


@pytest.mark.parametrize(
    ("word", "guess", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("crane", "nacre", "YYYYG"),
        ("apple", "paper", "YYGY-"),
        ("abbey", "babes", "YYGG-"),
        ("eagle", "eerie", "G---G"),
        ("house", "tight", "---Y-"),
    ],
)
def test_marks(word: str, guess: str, expected: str) -> None:
    assert word_guess.marks(word, guess) == expected


def test_words_are_words() -> None:
    assert len(set(word_guess.WORDS)) == len(word_guess.WORDS) > 150
    assert all(re.fullmatch("[a-z]{5}", word) for word in word_guess.WORDS)


def filter_by_marks(messages: list[dict[str, Any]]) -> str:
    """A player that guesses the first word which fits all marks."""
    seen = [re.match(r"(\w{5}): (\S{5})\.", m["content"]) for m in messages if m["role"] == "user"]
    marks = [(match[1], match[2]) for match in seen if match]
    return "maybe [%s]" % next(  # noqa: UP031
        word for word in word_guess.WORDS if all(word_guess.marks(word, guess) == m for guess, m in marks)
    )


def test_a_good_player_finds_the_word(engine: ChatEngine) -> None:
    games = play(engine, "word_guess", filter_by_marks)
    assert [trace.reward for _, trace in games] == [1.0] * 3
    assert [trace.num_turns for _, trace in games] == [1, 2, 2], "the game ends when the word is found"


def test_a_bad_player_gets_six_turns(engine: ChatEngine) -> None:
    silent = play(engine, "word_guess", lambda _: "hm", count=1)[0][1]
    guessing = play(engine, "word_guess", lambda _: "[Acorn]", count=1)[0][1]
    assert (silent.reward, silent.num_turns, silent.metrics["valid_guesses"]) == (0.0, 6, 0.0)
    assert guessing.reward == 0.0 and guessing.metrics["closest"] == pytest.approx(0.4)
    assert "No five-letter word in brackets. 1 left." in silent.transcript


# alphabet_sort


def sort_all(messages: list[dict[str, Any]]) -> str:
    names = [line for m in messages if m["role"] == "user" for line in m["content"].splitlines()[1:]]
    return "\n".join(f"{i}. {name}" for i, name in enumerate(sorted(names, key=lambda n: n.split()[-1]), 1))


def test_sorting_right_pays_one_over_all_turns(engine: ChatEngine) -> None:
    played = play(engine, "alphabet_sort", sort_all, min_turns=2)
    assert all(trace.reward == 1.0 and trace.metrics["exact"] == 1.0 for _, trace in played)
    assert [trace.num_turns for _, trace in played] == [len(data.turns) for data, _ in played]
    assert {trace.num_turns for _, trace in played} <= {2, 3}


def test_partly_sorted_lists() -> None:
    wanted = ["Bo Abbott", "Al Baker", "Cy Dube", "Di Evans"]
    assert alphabet_sort.list_score(wanted, "\n".join(wanted)) == 1.0
    assert alphabet_sort.list_score(wanted, "- Bo Abbott\n- Al Baker\n- Di Evans\n- Cy Dube") == 0.5
    assert alphabet_sort.list_score(wanted, "Bo Abbott\nAl Baker\nCy Dube") == 0.0
    assert alphabet_sort.list_score(wanted, "\n".join([*wanted, "and me"])) == 0.0


def test_last_names_never_tie(engine: ChatEngine) -> None:
    config = environment_config(
        "alphabet_sort", EnvConfig(taskset={"max_turns": 5, "names_per_turn": 5}), seed=1
    )
    for task in vf.load_taskset(config.taskset).take(50):
        lasts = [name.split()[-1] for names in task.data.turns for name in names]
        assert len(set(lasts)) == len(lasts)


# wiki_search


def test_the_island_is_the_same_everywhere() -> None:
    book = _island.encyclopaedia()
    assert len(book.articles) == _island.TOWNS + _island.PEOPLE and len(book.questions) == 66
    assert len({question.prompt for question in book.questions}) == len(book.questions)
    for question in book.questions:
        assert question.answer not in question.prompt
        assert any(question.answer in article.text for article in book.articles.values())


def test_search_finds_what_is_asked_for() -> None:
    book = _island.encyclopaedia()
    for title in book.articles:
        assert book.search(title)[0] == title
    assert book.search("zzz") == [] and len(book.search("river town founded")) == 5


def look_up(messages: list[dict[str, Any]]) -> Reply:
    """Searches for the name in the question, reads what it finds, reads on, then answers."""
    book, question = _island.encyclopaedia(), next(m["content"] for m in messages if m["role"] == "user")
    read = [m["content"] for m in messages if m["role"] == "tool"]
    name = re.findall(r"(?:of|was) ([A-Z]\w+(?: [A-Z]\w+)?)|of ([A-Z]\w+)", question)[-1]
    title = next(part for part in name if part)
    if not read:
        return call("wiki_search", query=title)
    if len(read) == 1:
        return call("wiki_read", title=read[0].splitlines()[0])
    answer = next(q.answer for q in book.questions if q.prompt == question)
    return f"I read it.\n<answer>The {answer}</answer>"


def call(name: str, **arguments: str) -> Reply:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def test_wiki_search_runs_its_tools(engine: ChatEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the tool server is a process in a directory of its own
    engine.requests.clear()
    played = play(engine, "wiki_search", look_up, count=2)
    assert [trace.reward for _, trace in played] == [1.0, 1.0]
    assert [trace.metrics["tool_calls"] for _, trace in played] == [2.0, 2.0]
    tools = {tool["function"]["name"] for tool in engine.requests[0]["tools"]}
    assert tools == {"wiki_search", "wiki_read"}
    told = [m["content"] for m in engine.requests[2]["messages"] if m["role"] == "tool"]
    assert any(article.text in told[-1] for article in _island.encyclopaedia().articles.values())


def test_answers_are_compared_by_their_words() -> None:
    assert wiki_search.given_answer("x <answer>a</answer> <answer> Balhal.\n</answer>") == " Balhal.\n"
    assert wiki_search.normalised("The Balhal.") == wiki_search.normalised(" balhal ")
    assert wiki_search.normalised(wiki_search.given_answer("It is Balhal")) != "balhal"


# reasoning_gym


@pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning_gym is not installed"
)
def test_reasoning_gym_by_name(engine: ChatEngine) -> None:
    import reasoning_gym

    data = reasoning_gym.create_dataset("basic_arithmetic", size=2, seed=5)
    answers = {entry["question"]: entry["answer"] for entry in data}
    options = {"dataset": "basic_arithmetic", "size": 2, "seed": 5}
    right = play(
        engine, "reasoning_gym", lambda m: f"<answer>{answers[m[-1]['content']]}</answer>", 2, **options
    )
    assert [trace.reward for _, trace in right] == [1.0, 1.0]
    with pytest.raises(ValueError, match="did you mean basic_arithmetic"):
        play(engine, "reasoning_gym", lambda _: "", dataset="basic_aritmetic")


def test_records_of_reasoning_gym_keep_their_tuples() -> None:
    """A judge that compares grids with `==` finds no list equal to a tuple."""
    entry = {"answer": "1", "metadata": {"grid": ((1, 2), (3,)), "rows": [(1,), [2]], "none": None}}
    back = reasoning_gym_taskset.unpacked(reasoning_gym_taskset.packed(entry))
    assert back == entry and isinstance(back["metadata"]["rows"][0], tuple)


def test_an_answer_that_the_judge_cannot_read_is_wrong(
    engine: ChatEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error it would be left out of the mean, which would then be too good."""
    extract = SimpleNamespace(extract_answer=lambda text, tag_name: text)
    records = [{"question": "a number", "answer": "7"}] * 2
    fake = SimpleNamespace(
        utils=extract,
        create_dataset=lambda *_, **__: records,
        get_score_answer_fn=lambda _: lambda answer, entry: float(int(answer) == int(entry["answer"])),
    )
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", SimpleNamespace(DATASETS={"numbers": None}))
    for reply, reward in (("7", 1.0), ("no idea", 0.0)):
        played = play(engine, "reasoning_gym", lambda _, text=reply: text, 1, dataset="numbers")
        assert [trace.reward for _, trace in played] == [reward]


def test_reasoning_gym_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    config = environment_config("reasoning_gym", EnvConfig(), seed=0)
    with pytest.raises(ValueError, match=r"pip install 'prl\[reasoning_gym\]'"):
        list(vf.load_taskset(config.taskset))
