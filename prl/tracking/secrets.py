"""Hiding secrets in what leaves a run: params, tags, configs, command lines, diffs, scripts, messages.

A value is hidden for the name that it has (`api_key`, `headers`, `HF_TOKEN`) or for its own look (a bearer
token, a private key, a login within a URL). Names of environment variables (`*_var`) are no secrets.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

HIDDEN = "***"
_KEYS = ("api_key", "apikey", "private_key", "access_key", "password", "passwd", "secret", "token", "bearer")
_NAMES = frozenset((*_KEYS, "headers", "authorization", "cookie", "credentials", "heartbeat_url"))
_ENDINGS = tuple(f"_{name}" for name in _NAMES)
_VARIABLE = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASS|PASSWORD|PASSWD|PWD|CREDENTIALS?|AUTH|PAT)(_|$)")
"""What the name of an environment variable with a secret has in it."""
_LOOKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=//)[^/@\s]+(?=@)",
        r"(?i)(?<=\bbearer )[\w.~+/=-]{8,}",
        r"\b(?:sk|pk|rk)-[\w-]{16,}",
        r"\b(?:hf|ghp|gho|ghs|glpat|xox[abp])[_-][\w-]{16,}",
        r"\bgithub_pat_\w{16,}",
        r"\bAKIA[A-Z0-9]{16}\b",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    )
)
_WORD = re.compile(r"""[^\s'"=]+=(?:'[^']*'|"[^"]*"|\S*)""")
_PAIR = re.compile(
    r"""(?P<name>[\w-]+)(?P<mid>["']?\s*[:=]\s*)(?P<quote>["']?)(?P<value>[^\s"',}\]()]+)(?P=quote)"""
)


def is_secret(name: str) -> bool:
    """Whether values under this key may hold a secret."""
    plain = name.lower().replace("-", "_")
    if plain in _NAMES or plain.endswith(_ENDINGS):
        return True
    return name.isupper() and not plain.endswith("_var") and _VARIABLE.search(name) is not None


def redact(tree: Any) -> Any:
    """A copy of a config tree without secret values."""
    if isinstance(tree, str):
        for look in _LOOKS:
            tree = look.sub(HIDDEN, tree)
        return tree
    if isinstance(tree, list):
        return [redact(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {key: _hide(node) if is_secret(str(key)) else redact(node) for key, node in tree.items()}


def redact_override(override: str) -> str:
    """`algo.teacher.headers.Authorization=abc` -> `…=***`, in tables (`algo.teacher={headers: {…}}`) too;
    anything that is no secret stays."""
    path, equals, value = override.partition("=")
    if equals and any(map(is_secret, re.split(r"[.@]", path.lstrip("+~")))):
        return f"{path}={HIDDEN}"
    if equals and value[:1] in ("{", "["):
        return f"{path}={_redact_table(value)}"
    return str(redact(override))


def redact_text(text: str, shortest: int = 1) -> str:
    """Text in which the values of `key=value`, `key: value`, `"key": "value"` with a secret key are hidden.

    `shortest`: fewer characters than that are no secret, so that code like `token=token` stays readable.
    """

    def hide_word(word: re.Match[str]) -> str:
        value = word[0].partition("=")[2].strip("'\"")
        return redact_override(word[0]) if len(value) >= shortest else word[0]

    def hide_pair(pair: re.Match[str]) -> str:
        if not is_secret(pair["name"]) or len(pair["value"]) < shortest or HIDDEN in pair["value"]:
            return pair[0]
        return f"{pair['name']}{pair['mid']}{pair['quote']}{HIDDEN}{pair['quote']}"

    return _PAIR.sub(hide_pair, str(redact(_WORD.sub(hide_word, text))))


def _redact_table(value: str) -> str:
    """A table or list of an override; one that cannot be read is hidden if it speaks of a secret."""
    try:
        tree = yaml.safe_load(value)
    except yaml.YAMLError:
        names = re.findall(r"[\w-]+(?=['\"]?\s*:)", value)
        return HIDDEN if any(map(is_secret, names)) else str(redact(value))
    hidden = redact(tree)
    if hidden == tree:
        return value
    return yaml.safe_dump(hidden, default_flow_style=True, width=10**6, allow_unicode=True).strip()


def _hide(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _hide(value) for key, value in node.items()}
    return node if node is None else HIDDEN
