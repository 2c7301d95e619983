"""Completions as text, in the wording of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prl.inference.request import Request
from prl.inference.text import ChatText, TextStream

ScoredTokens = list[tuple[int, float]]
"""(token id, log-probability) pairs."""


@dataclass(slots=True)
class Choice:
    """One completion as text, filled while it grows."""

    index: int
    request: Request
    stream: TextStream
    text: str = ""
    finish_reason: str | None = None
    tokens: ScoredTokens = field(default_factory=list)

    def grow(self, token_ids: list[int], logprobs: list[float], reason: str | None = None) -> str:
        """Take in new tokens, the last ones if there is a finish `reason`; the text that they add.

        The token that stopped the completion is not part of its text, nor is anything from a stop string on.
        """
        added = ""
        for number, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True), start=1):
            self.tokens.append((token, logprob))
            if reason != "stop" or number < len(token_ids):
                added += self.stream.push(token)
            if self.stream.stopped:
                reason = "stop"
                break
        if reason is not None:
            self.finish_reason = reason
            added += self.stream.finish()
        self.text += added
        return added


class Format:
    """How the chat route or the plain one words its answers."""

    def __init__(self, *, chat: bool, model: str, text: ChatText, with_logprobs: bool) -> None:
        self.chat = chat
        self._text = text
        self._with_logprobs = with_logprobs
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer without its usage, when all choices have ended."""
        words = [self._whole_choice(choice) for choice in choices]
        return {
            **self._head,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": words,
        }

    def chunk(self, deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One event of a stream."""
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": list(deltas)}

    def opening(self, choice: Choice) -> dict[str, Any]:
        """What a chat stream begins with, for each choice."""
        return {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def delta(self, choice: Choice, added: str, tokens: ScoredTokens) -> dict[str, Any]:
        """What a step added to a choice."""
        body: dict[str, Any] = {"text": added}
        if self.chat:
            body = {"delta": {"content": added} if added else {}}
        return self._entry(choice, body, tokens)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        body: dict[str, Any] = {"text": choice.text}
        if self.chat:
            body = {"message": {"role": "assistant", "content": choice.text}}
        return self._entry(choice, body, choice.tokens)

    def _entry(self, choice: Choice, body: dict[str, Any], tokens: ScoredTokens) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._with_logprobs else None
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _logprobs(self, tokens: ScoredTokens) -> dict[str, Any]:
        texts = [self._text.token_text(token) for token, _ in tokens]
        values = [logprob for _, logprob in tokens]
        if not self.chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        pairs = zip(texts, values, strict=True)
        entries = [
            {"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []} for t, v in pairs
        ]
        return {"content": entries}


def count_usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, int]:
    """Token counts of a request; each prompt counts once, however many choices it has."""
    prompt = sum(map(len, prompts))
    sampled = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
