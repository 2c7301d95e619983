"""Metric names as MLflow takes them: the one place where a name changes on its way to the tracker.

| in the stream               | in MLflow                        | why                                       |
|-----------------------------|----------------------------------|-------------------------------------------|
| `avg@4`, `pass^2`           | `avg_at_4`, `pass_hat_2`         | characters that MLflow refuses            |
| `loss(x)[0]`, `a=b`, `80%`  | `loss_x__0_`, `a_b`, `80_`       | any other refused character becomes `_`   |
| `/a//b/`, `./a`, `a/../b`   | `a/b`, `_/a`, `a/__/b`           | a path has no empty parts, no dot parts   |
| `..a/b`                     | `__a/b`                          | a path must not seem to lead upwards      |
| `time/step`                 | `trainer/time/step`              | several producers measure their own time  |
| a name of a second producer | `<producer>/<name>`              | two producers never share a curve         |
| more than 250 characters    | the first 241, `_`, 8 hex digits | the limit of MLflow                       |
| two that become the same    | the second, `_`, 8 hex digits    | no curve is mixed with another            |
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

MAX_LENGTH = 250
PER_PRODUCER = ("time/",)
_SPELLED = {"@": "_at_", "^": "_hat_"}
_REFUSED = re.compile(r"[^/\w.\- :]")


class MetricNames:
    """Stable names for one MLflow run: the same (producer, name) always gives the same result.

    `known`: `<producer> <name>` -> MLflow name, of all that were given so far, in their order. Keep it over a
    resume: who comes first has the bare name, and may come second the next time.
    """

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self.known = dict(known or {})
        self._first: dict[str, str] = {}
        self._taken = {given: key for key, given in self.known.items()}
        for key in self.known:
            producer, _, name = key.partition(" ")
            self._first.setdefault(name, producer)

    def of(self, producer: str, name: str) -> str:
        """The MLflow name of a metric of `producer`."""
        key = f"{producer} {name}"
        if key not in self.known:
            self.known[key] = self._choose(producer, name, key)
        return self.known[key]

    def _choose(self, producer: str, name: str, key: str) -> str:
        own = name.startswith(PER_PRODUCER) or self._first.setdefault(name, producer) != producer
        source = f"{producer}/{name}" if own else name
        safe = safe_name(source)
        if self._taken.setdefault(safe, key) != key:
            safe = _with_digest(safe, source)
            self._taken[safe] = key
        return safe


def safe_name(name: str) -> str:
    """`name` in the characters, shape and length that MLflow takes. Never empty."""
    for character, spelled in _SPELLED.items():
        name = name.replace(character, spelled)
    parts = [part for part in _REFUSED.sub("_", name).split("/") if part.strip()]
    safe = "/".join("_" * len(part) if set(part) == {"."} else part for part in parts) or "_"
    if safe.startswith(".."):
        safe = "__" + safe[2:]
    return safe if len(safe) <= MAX_LENGTH else _with_digest(safe, name)


def _with_digest(safe: str, source: str) -> str:
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    return f"{safe[: MAX_LENGTH - 9]}_{digest}"
