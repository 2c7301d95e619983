"""Every command and configuration that the Markdown files show is composed or executed.

Found: fenced blocks and inline code. How each is treated, by its language and by what stands above the block:

- `bash`: the shell must be able to read it. Every `prl` command in it is composed and checked with all rules;
  tools (`prl watch`, `prl eval compare`) must exist.
- `<!-- executed -->` above a `bash` block: it is executed as a whole, in an empty directory.
- a block with `$ command` lines: the refused ones must print exactly the lines that follow.
- `yaml`, `python`, `toml`: read; with a first line `# path/to/file` (or after `# @package`) they exist for
  its commands.
- inline `python -m prl ...`: composed like those in blocks, unless it holds `...` or `<...>` to be filled in.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from prl.__main__ import COMMANDS, TOOLS
from prl.__main__ import main as prl
from prl.assets import bundled_model
from prl.config import hydra_app
from prl.config.command_line import parse
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.eval_line import expand

REPOSITORY = Path(__file__).parents[2]
SKIPPED = ("outputs", "multirun", "dist", "build", "node_modules")
EXECUTED = "<!-- executed -->"
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.M | re.S)
INLINE = re.compile(r"(?<!`)`((?:python -m prl|prl) [^`\n]+)`(?!`)")
FILE_COMMENT = re.compile(r"(?:# @package [^\n]*\n)?# ([\w./-]+\.(?:yaml|py|toml))\b")
NOT_HERE = ("is not installed in this environment",)
"""Reasons that speak of this machine, not of the command."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its language, and whether it says that it is executed."""

    place: str
    language: str
    text: str
    executed: bool


def pages() -> list[Path]:
    found = []
    for path in sorted(REPOSITORY.rglob("*.md")):
        parts = path.relative_to(REPOSITORY).parts
        if not any(part in SKIPPED or part.startswith(".") for part in parts[:-1]):
            found.append(path)
    return found


def blocks(text: str, name: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip().rsplit("\n", 1)[-1].strip()
        line = text.count("\n", 0, match.start()) + 1
        indent = match["indent"]
        body = "\n".join(part.removeprefix(indent) for part in match["text"].splitlines())
        yield Block(f"{name}:{line}", match["language"], body, before == EXECUTED)


def commands(text: str) -> Iterator[list[str]]:
    """The words of every prl command in a piece of shell, without redirections and what is piped to."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        for part in re.split(r"\s(?:&&|\|\||;|\|)\s", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:
                continue  # within a here document; `bash -n` judges the whole
            words = [word for word in words if not re.match(r"\d?>|&$", word)]
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words[1:3] == ["-m", "prl"] and words[0].endswith("python"):
                yield words[3:]
            elif words[:1] == ["prl"]:
                yield words[1:]


def inline_commands(text: str) -> Iterator[list[str]]:
    outside = FENCE.sub("", text)
    for match in INLINE.finditer(outside):
        if not re.search(r"\.\.\.|…|<\w|\bA B\b|[{}]", match[1]):
            yield from commands(match[1])


def examples() -> list[object]:
    """(page, words) of every command, each once."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        name = str(page.relative_to(REPOSITORY))
        shell = [
            words for b in blocks(text, name) if b.language in ("bash", "sh") for words in commands(b.text)
        ]
        for words in [*shell, *inline_commands(text)]:
            if (page, words) not in [(entry.values[0], entry.values[1]) for entry in found]:
                found.append(pytest.param(page, words, id=f"{name}: {shlex.join(words)}"[:150]))
    return found


def all_blocks(*languages: str) -> list[object]:
    found = [block for page in pages() for block in blocks(page.read_text(encoding="utf-8"), page.name)]
    return [pytest.param(block, id=block.place) for block in found if block.language in languages]


def lay_out(page: Path, place: Path) -> None:
    """Write the files that a page shows."""
    for block in blocks(page.read_text(encoding="utf-8"), page.name):
        if block.language in ("yaml", "python", "toml") and (named := FILE_COMMENT.match(block.text)):
            target = place / named[1]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text + "\n", encoding="utf-8")


def lay_out_what_is_named(words: list[str], place: Path) -> None:
    """Runs, models and data that a command takes for granted; a run to be made (`run.name=`) is none."""
    for previous, word in zip(["", *words], words, strict=False):
        key, _, value = word.rpartition("=") if "=" in word else ("", "", word)
        wanted = previous == "-m" or key.lstrip("+") in (
            "run",
            "model.path",
            "checkpoints",
            "algo.teacher.model",
        )
        if wanted and re.fullmatch(r"[\w./-]+", value) and value.startswith(("outputs/", "models/", "./")):
            shutil.copytree(bundled_model("tiny"), place / value / "weights", dirs_exist_ok=True)
            shutil.copytree(bundled_model("tiny"), place / value, dirs_exist_ok=True)
        if key.endswith("data.path") and re.search(r"\.(jsonl?|parquet|arrow)$", value):
            (place / value).parent.mkdir(parents=True, exist_ok=True)
            (place / value).touch()


def check_tool(words: list[str]) -> bool:
    """Whether the words call a tool; it must be where the table says."""
    for length in (2, 1):
        target = TOOLS.get(" ".join(words[:length]))
        if target:
            module, _, function = target.partition(":")
            spec = importlib.util.find_spec(module)
            assert spec is not None and spec.origin is not None, module
            names = {
                node.name for node in ast.parse(Path(spec.origin).read_text()).body if hasattr(node, "name")
            }
            assert function in names
            return True
    return False


def judge(words: list[str]) -> list[str]:
    """What is wrong with a command, as far as that can be told without starting it."""
    try:
        line = parse(expand(words), list(COMMANDS))
        if line.multirun:
            hydra_app._check_elements(line)
        elif "--help" not in line.flags and "--version" not in line.flags:
            compose_job(line.command, line.overrides, line.config_dirs, line.config_name)
    except ConfigErrors as errors:
        return [str(p) for p in errors.problems if not any(reason in p.reason for reason in NOT_HERE)]
    return []


@pytest.mark.parametrize(("page", "words"), examples())
def test_every_command_composes(page: Path, words: list[str], clean_place: Path) -> None:
    if check_tool(words):
        return
    lay_out(page, clean_place)
    lay_out_what_is_named(words, clean_place)
    assert judge(words) == []


@pytest.mark.parametrize("block", all_blocks("bash", "sh"))
def test_the_shell_can_read_every_block(block: Block) -> None:
    result = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    for script in re.findall(r"python (examples/[\w/-]+\.py)", block.text):
        assert (REPOSITORY / script).is_file()


@pytest.mark.parametrize("block", [b for b in all_blocks("bash", "sh") if b.values[0].executed])
def test_blocks_that_say_so_are_executed(block: Block, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ.get('PATH', '')}"
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)}
    (tmp_path / "place").mkdir()
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=tmp_path / "place",
        env=variables,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.mark.parametrize("block", all_blocks("", "console", "text"))
def test_refusals_are_shown_as_they_are_told(
    block: Block, clean_place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for said in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        command, _, output = said.partition("\n")
        for words in commands(command):
            if check_tool(words) or not judge(words):
                continue
            assert prl(words) == 2
            assert capsys.readouterr().err.strip() == output.strip()


HANDLED = ("bash", "sh", "", "console", "text", "yaml", "toml", "python", "json")
PLAIN_SHELL = re.compile(
    r"[\w./-]*python -m (pip|venv) |[\w./-]*python examples/|(cd|export|mkdir|cat|EOF)\b"
)
"""Lines of shell that speak of something else than prl."""


def skipped(block: Block) -> list[str]:
    """Lines of a block that no test here would look at."""
    if block.language not in HANDLED:
        return [f"a block of {block.language}"]
    text = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", block.text, flags=re.S | re.M)
    lines = [line.strip() for line in re.sub(r"\\\n\s*", " ", text).splitlines()]
    if block.language in ("bash", "sh"):
        told = [line for line in lines if line and not line.startswith("#")]
        return [line for line in told if not list(commands(line)) and not PLAIN_SHELL.match(line)]
    if block.language in ("", "console", "text"):
        shown = [line for line in lines if re.match(r"(\$ )?(python -m )?prl ", line)]
        asked = [words for line in shown if line.startswith("$ ") for words in commands(line[2:])]
        return [*shown[len(asked) :], *(shlex.join(w) for w in asked if check_tool(w) or not judge(w))]
    return []


@pytest.mark.parametrize("block", all_blocks(*HANDLED))
def test_no_block_is_passed_over(block: Block) -> None:
    assert skipped(block) == []


def test_no_page_has_a_block_of_another_kind() -> None:
    found = [block for page in pages() for block in blocks(page.read_text(encoding="utf-8"), page.name)]
    assert {block.language for block in found} <= set(HANDLED)


def test_what_would_be_passed_over_is_found() -> None:
    assert skipped(Block("p:1", "bash", "./run.sh x\npython -m prl max_steps=1", False)) == ["./run.sh x"]
    assert skipped(Block("p:1", "", "prl sft\n", False)) == ["prl sft"]
    assert skipped(Block("p:1", "console", "$ prl max_steps=2\nfine\n", False)) == ["max_steps=2"]
    assert skipped(Block("p:1", "mermaid", "x", False)) and not skipped(Block("p:1", "yaml", "a: 1", False))


@pytest.mark.parametrize("block", all_blocks("yaml", "toml", "python", "json"))
def test_files_can_be_read(block: Block) -> None:
    readers = {"yaml": yaml.safe_load, "toml": tomllib.loads, "python": ast.parse, "json": yaml.safe_load}
    assert readers[block.language](block.text) is not None


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_options_that_a_page_shows_compose(page: Path, clean_place: Path) -> None:
    """`# my_conf/algo/mine.yaml` is chosen from its directory as `algo=mine`."""
    lay_out(page, clean_place)
    for path in sorted(clean_place.rglob("*.yaml")):
        *directory, group, name = path.relative_to(clean_place).with_suffix("").parts
        if directory and (REPOSITORY / "conf" / group).is_dir():
            choice = f"{group}=[{name}]" if group == "env" else f"{group}={name}"
            command = "sft" if group == "data" else "rl"
            problems = judge([command, "--config-dir", str(clean_place.joinpath(*directory)), choice])
            assert problems == [], path


def test_the_collector_finds_what_is_there() -> None:
    shell = "X=1 python -m prl a=1 \\\n  b=2 # c\nls && prl sft\n"
    text = f"a `python -m prl algo=opd` b\n<!-- executed -->\n```bash\n{shell}```\n"
    (block,) = blocks(text, "page")
    assert block.executed and block.place == "page:3"
    assert list(commands(block.text)) == [["a=1", "b=2"], ["sft"]]
    assert list(inline_commands(text)) == [["algo=opd"]]
    assert list(inline_commands("`python -m prl eval ... x=1` `prl rl run.name=<name>`")) == []
    assert len(pages()) >= 4 and len(examples()) >= 40


def test_an_executed_block_finds_python(tmp_path: Path) -> None:
    shown = "python -m prl --version\npython -c 'import hydra' && echo done > here.txt\n"
    test_blocks_that_say_so_are_executed(Block("page:1", "bash", shown, True), tmp_path)
    assert (tmp_path / "place" / "here.txt").read_text() == "done\n"
    (tmp_path / "second").mkdir()
    with pytest.raises(AssertionError):
        test_blocks_that_say_so_are_executed(Block("p:1", "bash", "false\ntrue", True), tmp_path / "second")


def test_the_judge_refuses_what_is_wrong() -> None:
    assert judge(["algo=gpro"]) and judge(["--multirun", "optim.lr=1e-4,-1"]) and not judge(["algo=opd"])
    assert check_tool(["eval", "compare", "a", "b"]) and not check_tool(["eval", "reverse_text"])
