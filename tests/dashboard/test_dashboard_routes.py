from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from served_dashboard import Client, served
from synthetic_runs import Shape, write_run

from prl.dashboard.app import STATIC

TRAVERSALS = [
    "/static/../app.py",
    "/static/%2e%2e/app.py",
    "/static/..%2fapp.py",
    "/static/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc/passwd",
    "/static//etc/passwd",
    "/static/....//app.py",
    "/static/..%5capp.py",
    "/static/%00index.html",
    "/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/api/runs/..%2f..%2fetc%2fpasswd",
    "/api/runs/../../etc/passwd/status",
    "/api/runs/%2fetc/status",
    "//etc/passwd",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_no_path_leads_out_of_what_is_served(client: Client, path: str) -> None:
    answer = client.ask(path)
    assert answer.status in (400, 404), (path, answer.status)
    assert b"root:" not in answer.body and b"def make_app" not in answer.body


@pytest.mark.parametrize(
    "query", ["attempt=../../../etc", "attempt=1%2f..%2f..", "attempt=-1", "attempt=1e9"]
)
def test_an_attempt_is_a_number(client: Client, query: str) -> None:
    answer = client.ask(f"/api/runs/{client.id_of('done')}/logs?{query}")
    assert answer.status == 422 or answer.json["lines"] == []


def test_a_component_is_chosen_among_those_there_are(client: Client) -> None:
    told = client.run("done", "/logs?attempt=1&component=../../../configs/attempt_1/resolved")
    assert told["lines"] == []


def test_links_out_of_the_served_directory_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"id": "hush", "traces": []}\n')
    run = write_run(tmp_path / "served" / "run", Shape(episodes=32))
    for name in (
        "STATUS.md",
        "traces/stream.jsonl",
        "metrics/trainer.jsonl",
        "configs/attempt_1/command.txt",
    ):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    with served([tmp_path / "served"]) as client:
        assert client.run("run", "/status")["text"] == ""
        assert client.run("run", "/episodes")["total"] == 0
        assert client.run("run", "/config?attempt=1")["command"] == ""
        assert "loss/mean" not in client.run("run", "/metrics")["values"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_written(client: Client, method: str) -> None:
    answer = client.ask("/api/runs", method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7788", "127.0.0.1.evil.example", "0.0.0.0", ""]
)
def test_a_name_that_was_made_to_mean_this_host_is_refused(client: Client, host: str) -> None:
    assert client.ask("/api/runs", headers={"Host": host}).status == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:7788", "[::1]:7788"])
def test_the_names_of_this_host_are_served_also_through_a_tunnel(client: Client, host: str) -> None:
    assert client.ask("/health", headers={"Host": host}).status == 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/nothing", "/api/runs/none"])
def test_every_answer_has_the_security_headers(client: Client, path: str) -> None:
    headers = client.ask(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


def test_the_page_has_no_inline_script_or_style_and_asks_nobody_else() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.search(r"<script(?![^>]*\bsrc=)", page) is None
    assert "<style" not in page and "style=" not in page and re.search(r"\son\w+=", page) is None
    for path in STATIC.iterdir():
        text = path.read_text()
        outside = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert outside == set(), path
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        assert len(text.splitlines()) <= 450, path


def test_every_module_that_is_imported_is_shipped(client: Client) -> None:
    seen, left = set(), {"app.js"}
    while left:
        name = left.pop()
        seen.add(name)
        answer = client.ask(f"/static/{name}")
        assert answer.status == 200 and "javascript" in answer.headers["content-type"], name
        left |= set(re.findall(r'from "\./([\w.]+)"', answer.body.decode())) - seen
    assert seen == {path.name for path in STATIC.glob("*.js")}


def test_unknown_runs_and_rows_are_told_so(client: Client) -> None:
    assert client.ask("/api/runs/000000000000").status == 404
    run = client.id_of("done")
    for rest in (
        "episodes/99999",
        "episodes/-1",
        "episodes/0/tokens?trace=3&node=0",
        "episodes/0/tokens?trace=0&node=-1",
    ):
        assert client.ask(f"/api/runs/{run}/{rest}").status == 404, rest
    assert client.ask(f"/api/runs/{run}/episodes?sort=id").status == 422
    assert client.ask(f"/api/runs/{run}/series?key=a&axis=x").status == 422
    assert client.ask("/api/diff?" + "&".join(f"run={run}" for _ in range(9))).status == 422


def test_nothing_new_is_nothing_to_send(client: Client) -> None:
    run = client.id_of("done")
    series = client.get(f"/api/runs/{run}/series?key=loss/mean")
    assert client.ask(f"/api/runs/{run}/series?key=loss/mean&revision={series['revision']}").status == 204
    episodes = client.get(f"/api/runs/{run}/episodes")
    assert client.ask(f"/api/runs/{run}/episodes?revision={episodes['revision']}").status == 204


def test_the_list_and_a_run(client: Client) -> None:
    listed = client.get("/api/runs")
    assert {(run["group"], run["name"]) for run in listed} == {
        ("", "done"), ("", "going"), *(("sweep", str(i)) for i in range(4)),
    }  # fmt: skip
    run = client.run("done")
    assert run["state"] == "finished" and run["attempt_numbers"] == [1] and run["results"] is None
    assert client.run("done", "/status")["text"].startswith("# done")


def test_an_evaluation_shows_its_results(runs: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "eval", Shape(episodes=32))
    (run / "results.md").write_text("| env | avg@1 |\n|---|---|\n| a | 0.5 |\n")
    with served([tmp_path]) as client:
        assert client.run("eval")["results"].startswith("| env")


def test_curves_come_with_their_charts(client: Client) -> None:
    told = client.run("done", "/metrics")
    assert [chart["title"] for chart in told["charts"]][:2] == ["Reward", "Loss"]
    series = client.run("done", "/series?key=loss/mean&key=nothing&points=5")["series"]
    assert list(series) == ["loss/mean"] and series["loss/mean"]["x"][-1] == 8.0


def test_an_episode_and_its_tokens_and_its_group(client: Client) -> None:
    first = client.run("done", "/episodes?error=none&descending=false&limit=1")["rows"][0]
    episode = client.run("done", f"/episodes/{first['row']}")
    answer = episode["traces"][0]["nodes"][1]
    assert answer["role"] == "assistant" and answer["sampled"] and "token_ids" not in answer
    assert episode["traces"][0]["advantage"] == pytest.approx(episode["traces"][0]["reward"] - 0.5)
    tokens = client.run("done", f"/episodes/{first['row']}/tokens?trace=0&node=1")
    assert "".join(tokens["texts"]) == f"<|assistant|>{answer['content']}<|end|>"
    assert tokens["gap"][0] is None and tokens["gap"][1] == pytest.approx(-0.1)
    assert tokens["gap"][-1] == pytest.approx(0.5)
    group = client.run("done", f"/episodes/{first['row']}/group")["members"]
    assert len(group) == 8 and {member["group"] for member in group} == {episode["group"]}


def test_configs_of_a_sweep_differ_where_they_differ(client: Client) -> None:
    ids = {run["name"]: run["id"] for run in client.get("/api/runs")}
    told = client.get("/api/diff?" + "&".join(f"run={ids[str(i)]}" for i in range(4)))
    rows = {row["path"]: row["values"] for row in told["rows"]}
    assert rows["optim.lr"] == ["0.0001", "0.0003", "0.0001", "0.001"]
    assert rows["loss.name"] == ["ipo", "ipo", "icepop", "icepop"]
    assert set(rows) == {"optim.lr", "loss.name", "seed"}


def test_a_live_run_is_followed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "live", Shape(episodes=64))
    with served([tmp_path]) as client:
        before = client.run("live", "/episodes")
        with (run / "traces" / "stream.jsonl").open("a") as file:
            file.write((run / "traces" / "stream.jsonl").read_text().splitlines()[0] + "\n")
        after = client.ask(f"/api/runs/{client.id_of('live')}/episodes?revision={before['revision']}")
        assert after.status == 200 and after.json["total"] == 65


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(root.rglob("*"))}


def test_a_copied_directory_is_served_and_left_as_it_was(runs: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(runs / "done", copied / "done")
    (copied / "done" / "traces" / "index.jsonl").unlink()  # what a partial copy lacks
    before = snapshot(copied)
    for path in [copied, *copied.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        with served([copied]) as client:
            for rest in (
                "", "/metrics", "/series?key=loss/mean", "/episodes", "/episodes/3", "/episodes/3/group",
                "/episodes/3/tokens?trace=0&node=1", "/errors", "/timeline", "/logs?attempt=1",
                "/config?attempt=1", "/attempts/diff", "/status",
            ):  # fmt: skip
                client.run("done", rest)
            assert client.run("done", "/episodes")["total"] == 256
        assert snapshot(copied) == before
    finally:
        for path in [copied, *copied.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's count of bytes read")
def test_the_first_pages_of_a_run_of_100000_episodes_read_no_transcripts(tmp_path: Path) -> None:
    """What makes the page quick on any machine: what it reads does not grow with the transcripts."""
    run = write_run(tmp_path / "big", Shape(episodes=100_000, batch_size=1000, group_size=16))
    stream = (run / "traces" / "stream.jsonl").stat().st_size
    metrics = sum(path.stat().st_size for path in (run / "metrics").iterdir())
    with served([tmp_path]) as client:
        start = bytes_read()
        client.ask("/")
        for path in STATIC.iterdir():
            client.ask(f"/static/{path.name}")
        charts = client.run("big", "/metrics")["charts"]
        keys = "&".join(f"key={key}" for chart in charts for key in chart["keys"])
        client.run("big", f"/series?{keys}")
        first_pages = bytes_read() - start
        assert first_pages < 3 * metrics + 2_000_000 < stream / 10
        told = client.run("big", "/episodes")
        while told["share_read"] < 1:
            told = client.run("big", "/episodes")
        assert told["total"] == 100_000 and told["rows"][0]["id"] == "e99999"
        with_table = bytes_read() - start
        assert with_table < first_pages + 1.2 * (run / "traces" / "index.jsonl").stat().st_size + 2_000_000
        filtered = client.run("big", "/episodes?error=any&sort=reward&reward_from=0.5")
        client.run("big", f"/episodes/{told['rows'][0]['row']}")
        assert filtered["of"] == 100_000


def bytes_read() -> int:
    return int(re.search(r"rchar: (\d+)", Path(f"/proc/{os.getpid()}/io").read_text())[1])  # type: ignore[index]
