"""Kuhn poker, two seats of self-play. Endless, dealt from a seed, played offline.

Three cards (J < Q < K), one each; both ante a chip. A player may pass or bet one chip; after a bet the other
folds or calls; after two passes, or a call, the higher card takes the pot. A reply must be one legal move in
brackets, its word or first letter, as in `[bet]` or `[b]`; anything else is played as `[pass]` or `[fold]`
and costs part of the `legal` reward, less of it if the brackets are there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from statistics import mean

import verifiers.v1 as vf

from prl.env.tasksets._brackets import FORMAT_CREDIT, bracketed

CARDS = "JQK"
OPEN, FACING_BET = ("pass", "bet"), ("fold", "call")


class KuhnPokerData(vf.TaskData):
    """The deal: the cards of player0 and player1."""

    cards: str


class KuhnPokerTask(vf.Task[KuhnPokerData]):
    """Scored over both players' traces, by the environment."""


class KuhnPokerConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    seed: int = 0


class KuhnPokerTaskset(vf.Taskset[KuhnPokerTask, KuhnPokerConfig]):
    """Random deals."""

    INFINITE = True

    def load(self) -> Iterator[KuhnPokerTask]:
        rng = random.Random(self.config.seed)
        for _ in itertools.count():
            yield KuhnPokerTask(KuhnPokerData(cards="".join(rng.sample(CARDS, 2))), self.config.task)


class KuhnPokerEnvConfig(vf.EnvConfig):
    """Options of `env.<name>.agents`: both seats, and what legal play is worth."""

    player0: vf.AgentConfig = vf.AgentConfig()
    player1: vf.AgentConfig = vf.AgentConfig()
    legal_weight: float = 0.5
    """Weight of the share of legal replies, next to the chips won."""


class KuhnPokerEnv(vf.Env[KuhnPokerEnvConfig]):
    """One deal: the players move in turn; chips won are the zero-sum part of the reward."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        cards, moves = task.data.cards, []
        seat = vf.Task(vf.TaskData(idx=task.data.idx))
        async with agents.player0.interaction(seat) as player0, agents.player1.interaction(seat) as player1:
            while not is_over(moves):
                player = len(moves) % 2
                segment = await (player0, player1)[player].turn(prompt(cards[player], moves))
                moves.append(parse_move(segment.last_reply, moves))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        traces = [episode.by_agent[f"player{player}"][0] for player in (0, 1)]
        moves: list[str] = []
        legal: tuple[list[float], list[float]] = ([], [])
        while not is_over(moves):
            player = len(moves) % 2
            reply = (traces[player].assistant_messages[len(moves) // 2].content or "").strip()
            legal[player].append(legality(reply, moves))
            moves.append(parse_move(reply, moves))
        won = chips_won(task.data.cards, moves)
        for player, trace in enumerate(traces):
            trace.record_reward("chips", won if player == 0 else -won)
            trace.record_reward("legal", mean(legal[player]), self.config.legal_weight)
            trace.record_metric("illegal_moves", sum(share < 1.0 for share in legal[player]))


def legal_moves(moves: list[str]) -> tuple[str, str]:
    """What the player to move may do; the first is the one that gives up least."""
    return FACING_BET if moves and moves[-1] == "bet" else OPEN


def parse_move(reply: str, moves: list[str]) -> str:
    """The move that a reply makes; an illegal one passes or folds."""
    return named_move(reply, moves) or legal_moves(moves)[0]


def named_move(reply: str, moves: list[str]) -> str | None:
    """The legal move that a reply names by its word or its first letter."""
    given = bracketed(reply)
    return next((move for move in legal_moves(moves) if given in (move, move[0])), None)


def legality(reply: str, moves: list[str]) -> float:
    """1 for a legal move, a little for brackets around something else, 0 without them."""
    if named_move(reply, moves):
        return 1.0
    return 0.0 if bracketed(reply) is None else FORMAT_CREDIT


def prompt(card: str, moves: list[str]) -> str:
    """What the player to move sees."""
    last = f" opponent {moves[-1]}" if moves else ""
    return f"poker {card}{last} " + " ".join(f"[{move}]" for move in legal_moves(moves))


def is_over(moves: list[str]) -> bool:
    return bool(moves) and (moves[-1] in FACING_BET or moves == ["pass", "pass"])


def chips_won(cards: str, moves: list[str]) -> float:
    """Chips that player0 won (negative: lost) in a finished deal."""
    if moves[-1] == "fold":
        return -1.0 if len(moves) % 2 else 1.0
    stake = 2.0 if moves[-1] == "call" else 1.0
    return stake if CARDS.index(cards[0]) > CARDS.index(cards[1]) else -stake


__all__ = ["KuhnPokerEnv", "KuhnPokerTaskset"]
