"""How engines and clients word that a prompt does not fit."""

from __future__ import annotations

WORDS = ("maximum context length", "context length", "context_length_exceeded")


def is_overflow(message: str) -> bool:
    """Whether an error says that the prompt outgrew the engine's context."""
    return any(words in message.lower() for words in WORDS)
