"""What a request may ask of the sampler, checked once when it arrives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": None,
    "bad_words": None,
    "structured_outputs": None,
    "allowed_token_ids": None,
}
"""Keys that would change the distribution and are not computed here -> the value that changes nothing."""


GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one completion is sampled. Temperature 0 is greedy; top_k 0 and -1, top_p 1 and min_p 0 are off.

    `max_tokens` None means as many as the context leaves. `prompt_logprobs` asks for the log-probability of
    each prompt token under the model itself (temperature 1, nothing filtered).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False
    n: int = 1

    @classmethod
    def from_request(cls, raw: Mapping[str, Any], vocab_size: int) -> SamplingParams:
        """Parameters of a request body; keys that are not known are ignored, null means not given.

        Raises ValueError naming the key for a value out of range and for a key of `NEUTRAL` that is not.
        """
        _refuse_unsupported(raw)
        top_k = _integer(raw, "top_k", 0, low=-1)
        return cls(
            temperature=_number(raw, "temperature", 1.0, low=0.0),
            top_p=_number(raw, "top_p", 1.0, low=0.0, high=1.0, open_low=True),
            top_k=max(top_k or 0, 0),
            min_p=_number(raw, "min_p", 0.0, low=0.0, high=1.0),
            seed=_integer(raw, "seed", None, low=-(2**63), high=2**63 - 1),
            max_tokens=_integer(raw, "max_tokens", None, low=1),
            min_tokens=_integer(raw, "min_tokens", 0, low=0) or 0,
            stop_token_ids=_stop_token_ids(raw.get("stop_token_ids"), vocab_size),
            ignore_eos=bool(raw.get("ignore_eos")),
            prompt_logprobs=raw.get("prompt_logprobs") is not None,
            n=_integer(raw, "n", 1, low=1, high=4096) or 1,
        )

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """True if some tokens are excluded from the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def for_choice(self, index: int) -> SamplingParams:
        """Parameters of the `index`-th of `n` completions: a seed is moved on, so that they differ."""
        if self.seed is None or index == 0:
            return self
        return replace(self, seed=(self.seed + index + 2**63) % 2**64 - 2**63)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    for key, neutral in NEUTRAL.items():
        value = raw.get(key)
        if value is not None and value != neutral and value != {} and value != []:
            raise ValueError(f"{key}={value!r}: not supported by the embedded engine")


def _number(
    raw: Mapping[str, Any],
    key: str,
    default: float,
    *,
    low: float,
    high: float = math.inf,
    open_low: bool = False,
) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key}={value!r}: must be a number")
    if value < low or value > high or (open_low and value == low):
        raise ValueError(f"{key}={value}: must be in {'(' if open_low else '['}{low:g}, {high:g}]")
    return float(value)


def _integer(
    raw: Mapping[str, Any], key: str, default: int | None, *, low: int, high: int | None = None
) -> int | None:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{key}={value!r}: must be an integer")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{key}={value}: must be {bound}")
    return value


def _stop_token_ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("stop_token_ids: must be a list of token ids")
    return tuple(sorted({token for token in value if 0 <= token < vocab_size}))
