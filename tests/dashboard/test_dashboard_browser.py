"""The page itself, in headless Chromium: every view draws what the run holds and asks nobody else."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from browser_lab import PROGRAM, needs_browser, picture
from cdp import Page, browser
from served_dashboard import Client, served
from synthetic_runs import Shape, node, write_run

pytestmark = needs_browser

READY = "!!document.querySelector('#view')?.dataset.ready"


def drive(walk: Callable[[Page], Awaitable[None]], client: Client, width: int = 1280) -> None:
    """Run `walk` in a browser; a complaint of the page fails the test, and so does a foreign request."""

    async def run() -> None:
        assert PROGRAM is not None
        async with browser(PROGRAM) as page:
            await page.size(width, 860)
            await walk(page)
            assert page.console == []
            local = (client.url, "data:", "about:")
            assert [url for url in page.requests if not url.startswith(local)] == []

    asyncio.run(run())


def count(selector: str) -> str:
    return f"document.querySelectorAll({json.dumps(selector)}).length"


def text(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"


def test_the_list_leads_to_a_comparison(client: Client, tmp_path: Path) -> None:
    async def walk(page: Page) -> None:
        await page.open(client.url)
        await page.until(f"{count('#runs tbody tr')} === 6 && {count('td.curve path')} === 6")
        await picture(page, "runs", tmp_path)
        await page.choose("#search", "sweep icepop")
        await page.until(f"{count('#runs tbody tr')} === 2")
        await page.choose("#search", "sweep")
        await page.until(f"{count('#runs tbody tr')} === 4")
        await page.evaluate("document.querySelectorAll('#runs input').forEach((box) => box.click())")
        await page.evaluate("document.querySelector('#compare').click()")
        await page.until(f"{count('#compared tbody tr')} === 4 && {count('#diff tbody tr')} === 3")
        reward = '[data-title="Reward"] path.curve'
        await page.until(f"{count(reward)} === 4")
        await page.choose("#smoothing", "0.8")
        await page.until(f"{count('path.raw')} > 0 && location.hash.includes('smooth=0.8')")
        shown = await page.evaluate(text("#diff"))
        assert "optim.lr" in shown and "icepop" in shown and "max_steps" not in shown
        await picture(page, "compare", tmp_path)

    drive(walk, client)


def test_charts_have_axes_values_and_controls(client: Client, tmp_path: Path) -> None:
    run = client.id_of("done")
    reward = "document.querySelector('[data-title=\"Reward\"] .plot')"
    hover = (
        f"(() => {{ const p = {reward}, b = p.getBoundingClientRect(); p.dispatchEvent(new PointerEvent("
        "'pointermove', {clientX: b.left + b.width - 12, clientY: b.top + 50, bubbles: true})); })()"
    )

    async def walk(page: Page) -> None:
        await page.open(f"{client.url}/#/run/{run}")
        await page.until(f"{count('path.curve')} > 15")
        await page.evaluate(hover)
        tip = await page.until(f"{reward}.querySelector('.tip:not([hidden])')?.innerText")
        last = client.run("done", "/metrics")["values"]["train/agg/effective/agent/reward/mean"]
        assert tip.startswith("step 8") and f"{last:.4g}" in tip
        ticks = await page.evaluate(f"[...{reward}.querySelectorAll('text')].map((t) => t.textContent)")
        assert "8" in ticks and len(ticks) >= 5
        before = await page.evaluate(f"{reward}.querySelector('path.curve').getAttribute('d')")
        await page.evaluate("document.querySelector('#log').click()")
        await page.until(f"{reward}.querySelector('path.curve').getAttribute('d') !== {json.dumps(before)}")
        await page.choose("#axis", "relative")
        await page.until(f"[...{reward}.querySelectorAll('text')].some((t) => /^\\d+s$/.test(t.textContent))")
        await page.evaluate("document.querySelector('#theme').click()")
        assert await page.evaluate("document.documentElement.dataset.theme") == "dark"
        await picture(page, "overview_dark", tmp_path)
        await page.open(f"{client.url}/#/run/{run}/metrics")
        await page.choose("#metric-filter", "^mismatch_kl/")
        await page.until(f"{count('.names label')} === 2")
        await page.evaluate("document.querySelector('.names input').click()")
        await page.until(f"{count('path.curve')} === 1")

    drive(walk, client)


def test_traces_are_filtered_and_tokens_coloured(client: Client, tmp_path: Path) -> None:
    run = client.id_of("done")
    table = client.run("done", "/episodes?error=ToolError")

    async def walk(page: Page) -> None:
        await page.open(f"{client.url}/#/run/{run}/traces")
        await page.until("document.querySelector('#view').dataset.ready === '256'")
        await picture(page, "traces", tmp_path)
        await page.choose("#error", "ToolError")
        await page.until(f"document.querySelector('#view').dataset.ready === '{table['total']}'")
        assert "256 episodes" in await page.evaluate(text("#counts"))
        await page.choose("#error", "")
        await page.choose("#env", "arithmetic")
        await page.choose("#step_from", "3")
        await page.choose("#truncated", "true")
        wanted = client.run("done", "/episodes?env=arithmetic&step_from=3&truncated=true")["total"]
        await page.until(f"document.querySelector('#view').dataset.ready === '{wanted}'")
        assert "env=arithmetic" in await page.evaluate("location.hash")
        good = client.run("done", "/episodes?error=none&limit=1")["rows"][0]["row"]
        await page.open(f"{client.url}/#/run/{run}/episode/{good}?overlay=gap")
        await page.until(f"{READY} && {count('.tokens span')} > 10")
        colours = (
            "[...document.querySelectorAll('.turn.sampled .tokens span')].map((s) => s.style.background)"
        )
        gaps = await page.evaluate(colours)
        assert (
            gaps[0] == "" and "214" in gaps[1] and "38" in gaps[-1]
        )  # unknown, trainer below, trainer above
        await page.evaluate(
            "document.querySelector('.turn.sampled .tokens span:last-child')"
            ".dispatchEvent(new PointerEvent('pointerenter'))"
        )
        assert "gap 0.5" in await page.evaluate(text(".readout"))
        await page.choose("#overlay", "mask")
        await page.until(f"({colours})[1].includes('47')")
        await page.choose("#overlay", "advantages")
        await page.until(
            f"({colours})[1] !== '' && document.querySelector('.tokens').dataset.overlay === 'advantages'"
        )
        await picture(page, "episode", tmp_path)
        await page.open(f"{client.url}/#/run/{run}/group/{good}?overlay=advantages")
        await page.until("document.querySelector('#view').dataset.ready === '8'")
        assert await page.evaluate(count("#group .member")) == 8
        await picture(page, "group", tmp_path)

    drive(walk, client)


def test_the_other_views_of_a_copied_run(runs: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere"
    shutil.copytree(runs / "done", copied / "done")

    async def walk(page: Page) -> None:
        base = f"{client.url}/#/run/{client.id_of('done')}"
        await page.open(f"{base}/timeline")
        await page.until(f"{count('.lanes rect')} > 20 && {count('.lanes polygon')} === 1")
        assert "inference is the bottleneck" in await page.evaluate(text("#verdict"))
        await picture(page, "timeline", tmp_path)
        await page.open(f"{base}/errors")
        types = len(client.run("done", "/errors")["types"])
        await page.until(f"{count('#errors tbody tr')} === {types}")
        await page.open(f"{base}/logs")
        await page.until("document.querySelector('#view').dataset.ready === '7'")
        await page.choose("#level", "ERROR")
        await page.until("document.querySelector('#view').dataset.ready === '3'")
        assert "<script>alert(1)</script>" in await page.evaluate(text("#log"))
        await page.open(f"{base}/config")
        await page.until(f"{count('#config tr')} > 8")
        await page.open(f"{base}/status")
        await page.until(f"{READY} && {count('#status li')} === 2")
        assert "ended: FINISHED" in await page.evaluate(text("#status"))

    with served([copied]) as client:
        drive(walk, client)


def test_what_a_model_wrote_is_text_and_never_code(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "<img src=x onerror=alert(1)>", Shape(episodes=8, error_rate=0.0))
    attack = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    stream = run / "traces" / "stream.jsonl"
    records = [json.loads(line) for line in stream.read_text().splitlines()]
    for record in records:
        record["task_key"] = attack
        record["traces"][0]["nodes"] = [node(None, "user", attack, False), node(0, attack, attack, True)]
    stream.write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "traces" / "index.jsonl").unlink()
    (run / "STATUS.md").write_text(f"# {attack}\n\n- {attack}\n\n```\n{attack}\n```\n")

    async def walk(page: Page) -> None:
        base = f"{client.url}/#/run/{client.get('/api/runs')[0]['id']}"
        for tab in ("traces", "episode/3", "group/3", "status", "logs"):
            await page.open(f"{base}/{tab}")
            view = f'#view[data-tab="{tab.partition("/")[0]}"]'
            await page.until(f"!!document.querySelector({json.dumps(view)})?.dataset.ready")
        assert await page.evaluate("window.hacked ?? null") is None
        assert await page.evaluate(count("#page img, #page script")) == 0
        await page.open(f"{client.url}/#/")
        await page.until(f"{count('#runs tbody tr')} === 1")

    with served([tmp_path / "runs"]) as client:
        drive(walk, client)


@pytest.mark.parametrize("width", [420])
def test_a_narrow_window_scrolls_tables_and_not_the_page(client: Client, width: int) -> None:
    async def walk(page: Page) -> None:
        await page.open(f"{client.url}/#/run/{client.id_of('done')}/traces")
        await page.until("document.querySelector('#view').dataset.ready === '256'")
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth + 1")

    drive(walk, client, width)


def test_a_drag_zooms_all_charts_and_the_address_keeps_what_was_set(client: Client, tmp_path: Path) -> None:
    reward = "document.querySelector('[data-title=\"Reward\"] .plot')"
    drag = (
        f"(() => {{ const p = {reward}, b = p.getBoundingClientRect();"
        " const at = (kind, share) => p.dispatchEvent(new PointerEvent(kind,"
        " {clientX: b.left + 46 + share * (b.width - 56), clientY: b.top + 50, button: 0, bubbles: true}));"
        " at('pointerdown', 0.5); at('pointermove', 0.8);"
        " const band = p.querySelectorAll('rect.zoom').length; at('pointerup', 1);"
        " p.dispatchEvent(new MouseEvent('click', {clientX: b.right - 20, bubbles: true})); return band; })()"
    )
    steps = f"[...{reward}.querySelectorAll('text[text-anchor=middle]')].map((t) => Number(t.textContent))"
    entropy = "document.querySelector('[data-title=\"Entropy\"]')"

    async def walk(page: Page) -> None:
        await page.open(f"{client.url}/#/run/{client.id_of('done')}")
        await page.until(f"{count('path.curve')} > 15")
        whole = await page.evaluate(steps)
        assert await page.evaluate(drag) == 1
        await page.until("location.hash.includes('zoom=')")
        assert "traces" not in await page.evaluate("location.hash"), "a drag is no click"
        await page.until(f"Math.min(...{steps}) > {min(whole)} && {count('rect.zoom')} === 0")
        await page.evaluate(f"{entropy}.querySelector('.title').click()")
        await page.evaluate(f"[...{entropy}.querySelectorAll('button')].at(-1).click()")
        await page.until(f"{entropy}.classList.contains('wide')")
        near = await page.evaluate(steps)
        await page.evaluate("location.reload()")
        await page.until(f"{entropy}?.classList.contains('wide') && {count('path.curve')} > 15")
        await page.until(f"JSON.stringify({steps}) === {json.dumps(json.dumps(near).replace(' ', ''))}")
        pressed = f"[...{entropy}.querySelectorAll('button')].at(-1).getAttribute('aria-pressed')"
        await page.until(f"{pressed} === 'true'")
        await picture(page, "zoomed", tmp_path)
        await page.evaluate("document.querySelector('#whole').click()")
        await page.until(f"JSON.stringify({steps}) === {json.dumps(json.dumps(whole).replace(' ', ''))}")
        assert "zoom=" not in await page.evaluate("location.hash")

    drive(walk, client)


def test_the_list_is_used_by_keyboard_and_survives_a_reload(client: Client) -> None:
    async def walk(page: Page) -> None:
        await page.open(client.url)
        await page.until(f"{count('#runs tbody tr')} === 6")
        await page.evaluate("document.querySelector('[data-key=\"sort lr\"]').focus()")
        for kind in ("rawKeyDown", "char", "keyUp"):
            await page.send("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r")
        lr = "document.querySelector('[data-key=\"sort lr\"]')"
        await page.until(f"{lr}.parentElement.getAttribute('aria-sort') === 'descending'")
        assert await page.evaluate(f"document.activeElement === {lr}"), "the focus stays where it was"
        await page.evaluate(
            "[...document.querySelectorAll('#runs input')].slice(0, 2).forEach((b) => b.click())"
        )
        await page.evaluate("location.reload()")
        await page.until(f"{count('#runs input:checked')} === 2")
        assert await page.evaluate(f"{lr}.parentElement.getAttribute('aria-sort')") == "descending"
        assert "compare 2" in await page.evaluate(text("#compare"))
        await page.until(f"{count('#runs tbody tr')} === 6")
        unnamed = (
            "[...document.querySelectorAll('button, input, select, a')].filter((e) => !(e.innerText"
            " || e.getAttribute('aria-label') || e.labels?.length || e.title)).map((e) => e.outerHTML)"
        )
        for tab in ("overview", "metrics", "traces", "timeline", "logs", "config", "errors"):
            await page.open(f"{client.url}/#/run/{client.id_of('done')}/{tab}")
            await page.until(f"!!document.querySelector('#view[data-tab={tab}]')?.childElementCount")
            assert await page.evaluate(unnamed) == []

    drive(walk, client)
