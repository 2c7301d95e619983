"""What a progress bar says beside its bar: speed and the time that is left."""

from __future__ import annotations

from prl.tracking.board import Board

RECENT = 10
"""Steps that an estimate of the time left rests on."""


def outlook(board: Board) -> str:
    """`, 0:48 left at 8,371 tokens/s`; less where less is known, nothing before the first step."""
    left, speeds = seconds_left(board), list(board.curve("tokens_per_second").values())
    text = f", {clock(left)} left" if left is not None else ""
    return text + (f" at {speeds[-1]:,.0f} tokens/s" if text and speeds else "")


def seconds_left(board: Board) -> float | None:
    """From the median time of the last steps; None without an end or before the first step."""
    times = sorted(list(board.curve("step_time").values())[-RECENT:])
    if not times or board.max_steps is None:
        return None
    return times[len(times) // 2] * max(board.max_steps - board.trained_step, 0)


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
