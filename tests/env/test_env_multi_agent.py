"""The two-seat environments, played whole in this process against the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers.v1 as vf
from fake_engine import FakeEngine, last_user

from prl.assets import bundled_model
from prl.config.sources import EnvConfig
from prl.config.training import ModelConfig
from prl.env.convert import convert_episode
from prl.env.environment import environment_config
from prl.env.renderers import renderer_config
from prl.records import Episode, Trace


def play(engine: FakeEngine, name: str, count: int, **options: Any) -> list[Episode]:
    """Episodes of the first `count` tasks."""
    config = environment_config(name, EnvConfig(**options), 0)
    env = vf.load_environment(config)
    client = vf.TrainClientConfig(
        base_url=engine.base_url,
        api_key_var="PRL_API_KEY",
        renderer=renderer_config(ModelConfig(name="tiny")),
        renderer_model_name=str(bundled_model("tiny")),
    )
    context = vf.ModelContext(model="tiny", client=client, sampling=vf.SamplingConfig(max_tokens=32))

    async def one(task: vf.Task) -> Episode:
        (slot,) = env.slots(task)
        episode = await env.run_slot(slot, context)
        return convert_episode(episode, env=name, group_id="g", task={}, started_at=0.0)

    async def main() -> list[Episode]:
        async with env.serving():
            return await asyncio.gather(*(one(task) for task in env.taskset.take(count)))

    return asyncio.run(main())


def by_agent(episode: Episode) -> dict[str, list[Trace]]:
    grouped: dict[str, list[Trace]] = {}
    for trace in episode.traces:
        grouped.setdefault(trace.agent, []).append(trace)
    return grouped


def aggressive(prompt: str) -> str:
    """Bets and calls whatever the card."""
    return "[bet]" if "[bet]" in last_user(prompt) else "[call]"


def test_kuhn_poker_is_zero_sum_self_play(engine: FakeEngine) -> None:
    engine.answer = aggressive
    for episode in play(engine, "kuhn_poker", 6):
        players = by_agent(episode)
        assert set(players) == {"player0", "player1"}
        (first,), (second,) = players["player0"], players["player1"]
        assert first.trainable and second.trainable
        assert first.num_turns == second.num_turns == 1
        assert first.rewards["chips"] == -second.rewards["chips"]
        assert abs(first.rewards["chips"] or 0.0) == 2.0
        assert first.rewards["legal"] == second.rewards["legal"] == 0.5
        assert first.metrics == {"illegal_moves": 0.0}
        cards = [trace.nodes[0].content.split(" ")[1] for trace in (first, second)]
        assert ("JQK".index(cards[0]) > "JQK".index(cards[1])) == ((first.rewards["chips"] or 0.0) > 0)


def test_kuhn_poker_goes_on_after_an_illegal_move(engine: FakeEngine) -> None:
    engine.answer = lambda prompt: "huh" if "opponent" not in last_user(prompt) else aggressive(prompt)
    for episode in play(engine, "kuhn_poker", 3, agents={"legal_weight": 1.0}):
        first, second = (by_agent(episode)[name][0] for name in ("player0", "player1"))
        assert (first.num_turns, second.num_turns) == (2, 1)
        assert first.branches == [[0, 1, 2, 3]]
        assert (first.rewards["legal"], second.rewards["legal"]) == (0.5, 1.0)
        assert (first.metrics["illegal_moves"], second.metrics["illegal_moves"]) == (1.0, 0.0)
        assert abs(first.rewards["chips"] or 0.0) == 2.0


def test_proposer_and_solvers_train_on_each_other(engine: FakeEngine) -> None:
    """Two of four solvers are right: the proposer's word is as hard as it should be."""
    solved = {"right": 0}

    def answer(prompt: str) -> str:
        verb, _, word = last_user(prompt).partition(" ")
        if verb == "propose":
            return "[level]"
        solved["right"] += 1
        return f"[{word[::-1]}]" if solved["right"] % 2 else "level"

    engine.answer = answer
    (episode,) = play(engine, "proposer_solver", 1)
    agents = by_agent(episode)
    (proposer,), solvers = agents["proposer"], agents["solver"]
    assert [trace.nodes[0].content for trace in solvers] == ["reverse level"] * 4
    assert sorted(trace.reward or 0.0 for trace in solvers) == [0.0, 0.0, 1.0, 1.0]
    assert proposer.rewards == {"challenge": 1.0}
    assert proposer.metrics == {"valid": 1.0, "solved": 0.5}
    assert all(trace.trainable for trace in episode.traces)


def test_a_bad_proposal_earns_nothing_and_the_solvers_play_on(engine: FakeEngine) -> None:
    engine.answer = lambda prompt: "no word"
    (episode,) = play(engine, "proposer_solver", 1, agents={"attempts": 2})
    agents = by_agent(episode)
    seed_word = agents["proposer"][0].nodes[0].content.removeprefix("propose ")
    assert [trace.nodes[0].content for trace in agents["solver"]] == [f"reverse {seed_word}"] * 2
    assert agents["proposer"][0].rewards == {"challenge": 0.0}
    assert agents["proposer"][0].error is None
