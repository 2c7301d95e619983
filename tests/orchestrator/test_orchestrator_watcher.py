"""Applying weight versions: order, proof, and what happens when an engine fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from orchestrator_fakes import FakeEngine, inline, now, published, run_virtual

from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.watcher import Watcher
from prl.records import WeightVersion


class Bench:
    def __init__(self, *engines: FakeEngine, version: int = 0) -> None:
        self.engines = engines or (FakeEngine(),)
        self.line = Pipeline(version + 1, version)
        self.newest: WeightVersion | None = None
        self.reports: list[tuple[dict[str, float], int]] = []
        self.log: list[Any] = []
        self.watcher = Watcher(
            list(self.engines), self.line, newest=lambda: self.newest,
            announce=lambda: self.log.append(("announce", self.line.version, self.line.updating)),
            report=lambda values, version: self.reports.append((dict(values), version)), offload=inline,
        )  # fmt: skip

    def routes(self) -> list[str]:
        return [route for route, _ in self.engines[0].calls]


def test_order_of_an_update() -> None:
    async def scenario() -> None:
        it = Bench()
        seen: list[tuple[str, int, bool]] = []
        engine = it.engines[0]
        note = engine._note

        async def spy(route: str) -> None:
            seen.append((route, it.line.version, it.line.updating))
            await note(route)

        engine._note = spy  # type: ignore[method-assign]
        await it.watcher.apply(published(1))
        assert it.log == [("announce", 0, True)], "stale work is cancelled before the pause"
        assert seen == [("pause", 0, True), ("update", 0, True), ("resume", 0, True)]
        assert (it.line.version, it.line.updating, it.watcher.updates) == (1, False, 1)

    run_virtual(scenario())


def test_p17_the_version_moves_only_after_the_apply() -> None:
    async def scenario() -> None:
        it = Bench(FakeEngine(seconds=9.0))
        it.newest = published(1)
        task = asyncio.create_task(it.watcher.run())
        for at, version in ((4.0, 0), (8.9, 0), (9.2, 1)):
            await asyncio.sleep(at - now())
            assert it.line.version == version
        task.cancel()

    run_virtual(scenario())


def test_the_newest_version_is_applied_and_others_skipped() -> None:
    async def scenario() -> list[tuple[dict[str, float], int]]:
        it = Bench()
        it.newest = published(3)
        task = asyncio.create_task(it.watcher.run())
        await asyncio.sleep(5)
        it.newest = published(2)  # an older one never replaces it
        await asyncio.sleep(5)
        task.cancel()
        assert it.line.version == 3 and it.routes() == ["pause", "update", "resume"]
        return it.reports

    ((values, version),) = run_virtual(scenario())
    assert version == 3 and values["sync/fingerprint_ok"] == 1.0
    assert values["sync/seconds"] == pytest.approx(0.1)
    assert values["sync/bytes_per_second"] == pytest.approx(10_000)


def test_the_proof_of_a_broadcast_is_asked_for_when_all_engines_have_it() -> None:
    async def scenario() -> None:
        it = Bench()
        offered = replace(published(1), fingerprint="sampled")
        it.watcher._proof = lambda version: it.log.append(("proof", version)) or "print-1"
        await it.watcher.apply(offered)
        assert it.log == [("announce", 0, True), ("proof", offered)]
        assert it.routes() == ["pause", "update", "resume"] and it.line.version == 1

    run_virtual(scenario())


def test_another_fingerprint_is_fatal_and_names_both() -> None:
    async def scenario() -> Bench:
        it = Bench()
        it.engines[0].fingerprint = lambda version: "other"
        it.newest = published(1)
        with pytest.raises(
            RuntimeError, match=r"serves v1 with fingerprint other.*published v1 with .*print-1"
        ):
            await it.watcher.run()
        return it

    it = run_virtual(scenario())
    assert it.line.version == 0 and it.routes()[-1] == "resume" and not it.line.updating
    assert it.reports == [({"sync/fingerprint_ok": 0.0}, 1)]


def test_one_wrong_engine_among_many_is_enough() -> None:
    async def scenario() -> None:
        good, bad = FakeEngine(), FakeEngine()
        bad.fingerprint = lambda version: f"print-{version - 1}"
        it = Bench(good, bad)
        with pytest.raises(RuntimeError, match="print-0"):
            await it.watcher.apply(published(1))
        assert [route for route, _ in bad.calls] == ["pause", "update", "resume"]

    run_virtual(scenario())


@pytest.mark.parametrize("route", ["pause", "update"])
def test_p4_a_failed_update_is_not_repeated_and_engines_are_resumed(route: str) -> None:
    async def scenario() -> tuple[list[str], list[str]]:
        broken, other = FakeEngine(fail={route: ConnectionError("500")}), FakeEngine()
        it = Bench(broken, other)
        it.newest = published(1)
        with pytest.raises(ConnectionError, match="500"):
            await it.watcher.run()
        assert it.line.version == 0
        return [r for r, _ in broken.calls], [r for r, _ in other.calls]

    broken, other = run_virtual(scenario())
    assert broken[-1] == other[-1] == "resume"
    assert broken.count("update") == (route == "update") and other.count("pause") == 1


def test_engines_are_resumed_only_when_every_pause_has_ended() -> None:
    """One engine refuses at once; the slow pause of the other must not take hold after its resume."""

    async def scenario() -> None:
        broken, slow = (
            FakeEngine(seconds=0.3, fail={"pause": ConnectionError("500")}),
            FakeEngine(seconds=3.0),
        )
        with pytest.raises(ConnectionError, match="500"):
            await Bench(broken, slow).watcher.apply(published(1))
        assert slow.calls == [("pause", 0.0), ("resume", pytest.approx(1.0))]

    run_virtual(scenario())


def test_a_failed_resume_is_fatal() -> None:
    async def scenario() -> None:
        it = Bench(FakeEngine(fail={"resume": ConnectionError("gone")}))
        with pytest.raises(ConnectionError, match="gone"):
            await it.watcher.apply(published(1))
        assert it.line.version == 0

    run_virtual(scenario())


def test_all_engines_are_paused_before_any_is_updated() -> None:
    async def scenario() -> None:
        fast, slow = FakeEngine(seconds=0.3), FakeEngine(seconds=3.0)
        await Bench(fast, slow).watcher.apply(published(1))
        times = dict(fast.calls), dict(slow.calls)
        assert times[0]["update"] == times[1]["update"] == pytest.approx(1.0)
        assert times[0]["resume"] == times[1]["resume"] == pytest.approx(2.0)

    run_virtual(scenario())


def test_the_first_version_is_awaited_and_applied() -> None:
    async def scenario() -> float:
        it = Bench(version=4)

        async def publish() -> None:
            await asyncio.sleep(7)
            it.newest = published(4)

        task = asyncio.create_task(publish())
        await it.watcher.apply_first(4, 60)
        await task
        assert it.line.version == 4 and it.routes() == ["pause", "update", "resume"]
        return now()

    assert run_virtual(scenario()) == pytest.approx(7.2, abs=0.2)


def test_a_first_version_that_never_comes_is_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        run_virtual(Bench().watcher.apply_first(0, 30))


def test_weights_of_an_abandoned_attempt_are_refused() -> None:
    it = Bench(version=2)
    it.newest = published(5)
    with pytest.raises(ValueError, match="holds v5, but this run starts at v2"):
        run_virtual(it.watcher.apply_first(2, 30))
    assert it.routes() == []


def test_weights_stay_while_somebody_holds_them_and_each_application_is_told() -> None:
    async def scenario() -> None:
        it = Bench(FakeEngine(seconds=0.3))
        held, told = [True], []
        it.watcher._held, it.watcher._applied = lambda: held[0], told.append
        it.newest = published(1)
        task = asyncio.create_task(it.watcher.run())
        await asyncio.sleep(5)
        assert it.line.version == 0 and not it.line.updating and it.routes() == []
        held[0] = False
        await asyncio.sleep(1)
        assert it.line.version == 1 and told == [1]
        assert 5 <= it.watcher.last_wait <= 5.2
        task.cancel()

    run_virtual(scenario())
