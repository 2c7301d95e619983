"""Warnings about a batch that a user should act on, each kind at most once in a while."""

from __future__ import annotations

from prl.orchestrator.window import Window

QUIET_STEPS = 10
"""Steps for which a warning of one kind is not repeated."""
FEW_TRAINABLE = 0.1
MANY_DISCARDED = 0.5


class Alerts:
    """Knows what it said when."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def of(
        self, step: int, *, taken: int, shipped: int, window: Window, seconds: float, blocked: float
    ) -> list[str]:
        """Warnings for batch `step`.

        `shipped` of `taken` traces carry credit; `blocked` of `seconds` went into waiting for the trainer.
        """
        found = {}
        if shipped <= FEW_TRAINABLE * taken:
            found["few"] = (
                f"only {shipped} of {taken} rollouts carry credit; are the tasks too easy or too hard?"
            )
        if (share := window.discarded_share()) > MANY_DISCARDED:
            found["discarded"] = f"{share:.0%} of the rollouts were discarded: {window.reasons()}"
        if blocked > seconds - blocked:
            found["waiting"] = f"{blocked:.1f} of {seconds:.1f} s went into waiting for the trainer"
        due = [kind for kind in found if step - self._said.get(kind, -QUIET_STEPS) >= QUIET_STEPS]
        self._said |= dict.fromkeys(due, step)
        return [found[kind] for kind in due]
