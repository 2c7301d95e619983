"""Whole process trees: finding them and ending them, also where a parent is gone already.

Every process of a run inherits `FAMILY_VAR` with the run's own key, so that a descendant is found even after
its parent died and it was re-parented, or after it made itself a new session.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil

FAMILY_VAR = "PRL_FAMILY"
KILL_SECONDS = 5.0


def family(key: str) -> set[psutil.Process]:
    """Live processes that inherited `key`, and all their descendants; never the caller itself."""
    found = {process for process in psutil.process_iter() if _key_of(process) == key}
    for process in list(found):
        found |= descendants(process.pid)
    return {process for process in found if process.pid != os.getpid() and is_alive(process)}


def descendants(pid: int) -> set[psutil.Process]:
    """Live processes below `pid`."""
    try:
        return {child for child in psutil.Process(pid).children(recursive=True) if is_alive(child)}
    except psutil.NoSuchProcess:
        return set()


def is_alive(process: psutil.Process) -> bool:
    """Still this process (not another that got its pid) and not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL, each only if it still is the process that was meant."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def kill_family(key: str, known: Iterable[psutil.Process] = ()) -> set[psutil.Process]:
    """Kill the family of `key` and `known` until nothing is left; returns what outlived `KILL_SECONDS`.

    One pass is not enough: a process may fork between the look and the kill.
    """
    deadline = time.monotonic() + KILL_SECONDS
    left = family(key) | {process for process in known if is_alive(process)}
    while left and time.monotonic() < deadline:
        kill(left)
        time.sleep(0.02)
        left = family(key) | {process for process in left if is_alive(process)}
    return left


def _key_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(FAMILY_VAR)
    except (psutil.Error, OSError):  # gone, or another user's
        return None
