"""A completion on its way through the sampler, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from prl.inference.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """`tokens` consecutive tokens sampled from policy `version`."""

    version: int
    tokens: int


@dataclass(slots=True)
class Completion:
    """A finished completion. `token_ids` includes the stop token; `logprobs` are those of the distribution
    that each token was drawn from. `error` says why there is none."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_versions: list[VersionSpan]
    prompt_logprobs: list[float] | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One completion to sample. `watched` asks for every token as it is sampled, not only for the end."""

    prompt: tuple[int, ...]
    params: SamplingParams
    watched: bool = False
    limit: int = 0
    stop_ids: tuple[int, ...] = ()
    spans: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    cancelled: bool = False

    def mark_version(self, version: int, sampled: int) -> None:
        """From its token number `sampled` on, this completion is drawn from policy `version`."""
        if self.spans and self.spans[-1][1] == sampled:
            self.spans.pop()
        self.spans.append((version, sampled))

    def version_spans(self, sampled: int) -> list[VersionSpan]:
        """Which version made how many of the `sampled` tokens, in order."""
        ends = [start for _, start in self.spans[1:]] + [sampled]
        spans = [
            VersionSpan(version, end - start) for (version, start), end in zip(self.spans, ends, strict=True)
        ]
        return [span for span in spans if span.tokens > 0]


@dataclass(slots=True)
class Output:
    """What one step brought to a request: new tokens if it is watched, the completion if it ended."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    completion: Completion | None = None
