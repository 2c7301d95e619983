"""Makes the data that ships with prl: `python examples/sft/make_data.py [folder]`, the same bytes each time.

reverse_text   prompt and completion: a word, and the word reversed in brackets
instructions   messages with a system turn: eight kinds of instruction with one right answer
tool_calls     messages and tools: a question, a tool call, its result, the answer
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SYSTEM = "Answer in brackets."
PRICES = {"tea": 3, "rice": 2, "salt": 1, "oil": 6, "figs": 8, "nuts": 9}
TOOLS = [
    {
        "name": "add",
        "description": "Sum of two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
    {
        "name": "price",
        "description": "Price of an item",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
    },
]


def word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 8)))


def reverse_text(draw: random.Random) -> Row:
    text = word(draw)
    return {"prompt": f"reverse {text}", "completion": f"[{text[::-1]}]"}


INSTRUCTIONS: dict[str, Callable[[str], str]] = {
    "reverse": lambda text: text[::-1],
    "upper": lambda text: text.upper(),
    "repeat": lambda text: text,
    "first": lambda text: text[0],
    "last": lambda text: text[-1],
    "length": lambda text: str(len(text)),
    "sorted": lambda text: "".join(sorted(text)),
    "double": lambda text: "".join(letter * 2 for letter in text),
}


def instruction(draw: random.Random) -> Row:
    kind, text = draw.choice(sorted(INSTRUCTIONS)), word(draw)
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{kind} {text}"},
            {"role": "assistant", "content": f"[{INSTRUCTIONS[kind](text)}]"},
        ]
    }


def tool_call(draw: random.Random) -> Row:
    if draw.random() < 0.5:
        a, b = draw.randrange(10), draw.randrange(10)
        question, call, result = f"{a} and {b}?", {"name": "add", "arguments": {"a": a, "b": b}}, a + b
    else:
        item = draw.choice(sorted(PRICES))
        question, call, result = (
            f"cost of {item}?",
            {"name": "price", "arguments": {"item": item}},
            PRICES[item],
        )
    call["arguments"] = json.dumps(call["arguments"])
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": str(result)},
        {"role": "assistant", "content": f"[{result}]"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": tool} for tool in TOOLS]}


DATA = {"reverse_text": reverse_text, "instructions": instruction, "tool_calls": tool_call}
SIZES = {"train": 2000, "test": 200}


def main(folder: Path) -> None:
    for name, make in DATA.items():
        seen: set[str] = set()
        for split in ("test", "train"):
            draw, repeats = random.Random(f"{name}/{split}"), name == "tool_calls"
            rows = fresh_rows(make, draw, SIZES[split], seen, repeats)
            path = folder / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def fresh_rows(
    make: Callable[[random.Random], Row], draw: random.Random, count: int, seen: set[str], repeats: bool
) -> list[Row]:
    """`count` rows, none of them in `seen` unless `repeats`, as there are few different tool calls."""
    rows: list[Row] = []
    while len(rows) < (count if not repeats else count // 8):
        row = make(draw)
        text = json.dumps(row)
        if repeats or text not in seen:
            seen.add(text)
            rows.append(row)
    return rows


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "prl" / "assets" / "data"))
