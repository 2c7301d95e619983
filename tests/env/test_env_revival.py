"""A source whose server died goes on with the server that replaces it; one that waits in vain says so."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from prl.env import source as source_module
from prl.env.source import EnvServerDied, EnvSource, Task
from prl.records import Episode

TASK = Task("t", {})


class Client:
    """Stands for `EnvServerClient`; `dies` raises what a lost connection raises."""

    made: ClassVar[list[Client]] = []

    def __init__(self, name: str, address: str) -> None:
        self.address, self.closed, self.calls = address, False, 0
        self.dying = asyncio.Event()
        Client.made.append(self)

    async def wait_ready(self) -> None:
        await asyncio.sleep(0)
        if self.address == "stillborn":
            raise EnvServerDied("env/x at stillborn does not answer")

    async def run(self, request: dict[str, Any], patience: float) -> Any:
        self.calls += 1
        if self.address == "first":
            await self.dying.wait()
            raise EnvServerDied("lost")
        return type("Wire", (), {"task": TASK})()

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> EnvSource:
    Client.made = []
    monkeypatch.setattr(source_module, "EnvServerClient", Client)
    monkeypatch.setattr(
        source_module, "convert_episode", lambda wire, **_: Episode("e", "x", "g", "t", {}, [])
    )
    made = object.__new__(EnvSource)
    made.name, made.timeout, made._client, made._reviving, made._successor = "x", 10.0, None, None, None
    made._key, made._renderer, made._built = {}, {}, {}
    return made


def roll(env: EnvSource) -> asyncio.Task[Episode]:
    request: dict[str, Any] = {"base_url": "http://e/v1", "model": "m", "sampling": {}, "train": False}
    return asyncio.create_task(env.run(TASK, group_id="g", cache_salt=None, **request))


async def error_of(rollout: asyncio.Task[Episode]) -> str | None:
    episode = await rollout
    return episode.traces[0].error.type if episode.traces else None


def test_rollouts_of_the_dead_server_are_lost_and_later_ones_wait_for_its_successor(env: EnvSource) -> None:
    async def scenario() -> None:
        there = asyncio.Event()
        asked = 0

        async def successor() -> str:
            nonlocal asked
            asked += 1
            await there.wait()
            return "second"

        await env.start("first", successor)
        lost = [roll(env) for _ in range(3)]
        await asyncio.sleep(0.01)
        Client.made[0].dying.set()
        assert [await error_of(rollout) for rollout in lost] == ["EnvServerDied"] * 3
        later = [roll(env) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(rollout.done() for rollout in later) and Client.made[0].closed and asked == 1
        there.set()
        assert [await error_of(rollout) for rollout in later] == [None, None]
        assert Client.made[1].address == "second" and len(Client.made) == 2
        await env.close()
        assert Client.made[1].closed

    asyncio.run(scenario())


def test_a_successor_that_dies_before_it_answers_has_a_successor_of_its_own(env: EnvSource) -> None:
    async def scenario() -> None:
        addresses = iter(["stillborn", "third"])

        async def successor() -> str:
            return next(addresses)

        await env.start("first", successor)
        lost = roll(env)
        await asyncio.sleep(0.01)
        Client.made[0].dying.set()
        assert await error_of(lost) == "EnvServerDied"
        assert await error_of(roll(env)) is None
        assert [(made.address, made.closed) for made in Client.made] == [
            ("first", True), ("stillborn", True), ("third", False),
        ]  # fmt: skip
        await env.close()

    asyncio.run(scenario())


def test_settings_are_validated_once_and_never_mixed_up(env: EnvSource) -> None:
    made: list[dict[str, Any]] = []

    def kind(**fields: Any) -> dict[str, Any]:
        made.append(fields)
        return fields

    salts = [f"v{i % 300}" for i in range(900)]
    assert [
        env._once(kind, {"temperature": 1.0, "cache_salt": salt})["cache_salt"] for salt in salts
    ] == salts
    assert env._once(kind, {"temperature": 1}) != env._once(kind, {"temperature": 1.5})
    before = len(made)
    assert env._once(kind, {"temperature": 1.5}) is made[-1] and len(made) == before
    assert len(env._built) <= source_module.MOST_BUILT


def test_a_server_that_does_not_come_back_is_the_end(env: EnvSource) -> None:
    async def never() -> str:
        raise TimeoutError("no new address within 300 s")

    async def scenario() -> None:
        await env.start("first", never)
        lost = roll(env)
        await asyncio.sleep(0.01)
        Client.made[0].dying.set()
        assert await error_of(lost) == "EnvServerDied"
        with pytest.raises(EnvServerDied, match="env/x died and did not come back: no new address"):
            await roll(env)
        await env.close()

    asyncio.run(scenario())


def test_without_a_successor_death_is_the_end_at_once(env: EnvSource) -> None:
    async def scenario() -> None:
        await env.start("first")
        lost = roll(env)
        await asyncio.sleep(0.01)
        Client.made[0].dying.set()
        with pytest.raises(EnvServerDied):
            await lost
        await env.close()

    asyncio.run(scenario())
