"""Lines that only a GPU runs name things that exist: a misspelt `torch.cuda.…` shows nowhere else."""

from __future__ import annotations

import ast
from functools import reduce
from pathlib import Path

import torch

import prl

SOURCES = sorted(Path(prl.__file__).parent.rglob("*.py"))


def dotted(node: ast.AST) -> list[str] | None:
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return None if inner is None else [*inner, node.attr]
    return [node.id] if isinstance(node, ast.Name) else None


def absent(source: str) -> list[str]:
    """Names `torch.x.y` of a module that torch does not have."""
    chains = [dotted(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    found = {tuple(chain) for chain in chains if chain and chain[0] == "torch"}
    return [".".join(chain) for chain in sorted(found) if not exists(chain)]


def exists(chain: tuple[str, ...]) -> bool:
    try:
        reduce(getattr, chain[1:], torch)
    except AttributeError:
        return False
    return True


def test_every_name_of_torch_exists() -> None:
    faults = {str(file): names for file in SOURCES if (names := absent(file.read_text()))}
    assert not faults


def test_a_misspelt_name_is_found() -> None:
    assert absent("def f(d):\n    import torch\n    return torch.cuda.getdevice_name(d)\n") == [
        "torch.cuda.getdevice_name"
    ]
