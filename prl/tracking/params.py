"""A config as tracker params: flat, as text, without secrets."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "***"
# One launch differs from the next here, and the run does not.
PER_LAUNCH = ("run.resume", "run.clean", "dry_run")
_SECRET_NAMES = ("headers", "api_key", "password", "secret", "token", "heartbeat_url")
_SECRET_ENDINGS = ("_api_key", "_access_key", "_password", "_secret", "_token")
_IN_URL = re.compile(r"//[^/@\s]+@")
_WORD = re.compile(r"""[^\s'"=]+=(?:'[^']*'|"[^"]*"|\S*)""")


def flatten(config: Any) -> dict[str, str]:
    """`optim.lr` -> "0.0001" for every leaf of a typed config; lists as JSON, null as "null"."""
    leaves = _leaves(redact(dataclasses.asdict(config)), "")
    return {path: value for path, value in leaves if path not in PER_LAUNCH}


def redact(tree: Any) -> Any:
    """A copy of a config tree without secret values: HTTP headers, keys, passwords, logins within URLs."""
    if isinstance(tree, str):
        return _IN_URL.sub(f"//{HIDDEN}@", tree)
    if isinstance(tree, list):
        return [redact(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {key: _hide(node) if is_secret(str(key)) else redact(node) for key, node in tree.items()}


def redact_override(override: str) -> str:
    """`algo.teacher.headers.Authorization=abc` -> `…=***`; anything that is no secret stays."""
    path, equals, _ = override.partition("=")
    hidden = equals and any(map(is_secret, path.lstrip("+~").split(".")))
    return f"{path}={HIDDEN}" if hidden else str(redact(override))


def redact_text(text: str, shortest: int = 1) -> str:
    """Text in which the values of words `key=value` (`export KEY=value`) with a secret key are hidden.

    `shortest`: fewer characters than that are no secret, so that code like `token=token` stays readable.
    """

    def hide(word: re.Match[str]) -> str:
        value = word[0].partition("=")[2].strip("'\"")
        return redact_override(word[0]) if len(value) >= shortest else word[0]

    return _WORD.sub(hide, text)


def is_secret(name: str) -> bool:
    """Whether values under this key may hold a secret. Names of environment variables (`*_var`) do not."""
    name = name.lower()
    return name in _SECRET_NAMES or name.endswith(_SECRET_ENDINGS)


def _hide(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _hide(value) for key, value in node.items()}
    return node if node is None else HIDDEN


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, node in tree.items():
            yield from _leaves(node, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)
