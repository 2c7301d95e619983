"""State of the sequences being decoded, as tensors with one row per slot; active slots are always in front.

Nothing here costs Python time per token: a step touches whole columns, and Python looks at a row only
when it begins or ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prl.inference.request import Request
from prl.inference.sampling import BELOW_ONE, Controls

POSITION, COUNT, LIMIT, MINIMUM, LAST, TOP_K, GREEDY = range(7)
TEMPERATURE, TOP_P, MIN_P = range(3)


class Slots:
    """Rows of up to `length` tokens for up to `size` sequences."""

    def __init__(self, size: int, length: int, device: torch.device, seed: int) -> None:
        self.size, self.device = size, device
        self.requests: list[Request] = []
        self._ints = torch.zeros(size, 7, dtype=torch.int64, device=device)
        self._floats = torch.zeros(size, 3, device=device)
        self._stops = torch.full((size, 1), -1, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(size, length, dtype=torch.float64, device=device)
        self._tokens = torch.zeros(size, length + 1, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(size, length + 1, device=device)
        self._random = torch.Generator().manual_seed(seed)
        self._seeded = torch.Generator()
        self._longest_limit = 0
        self._held_back = False
        self.watched: list[int] = []
        self.controls = self._refresh()

    @property
    def active(self) -> int:
        return len(self.requests)

    @property
    def free(self) -> int:
        return self.size - len(self.requests)

    @property
    def last_tokens(self) -> Tensor:
        """Token sampled last by each active slot: [n]."""
        return self._ints[: self.active, LAST].contiguous()

    @property
    def positions(self) -> Tensor:
        """Position of that token in its sequence: [n]."""
        return self._ints[: self.active, POSITION].contiguous()

    @property
    def uniforms(self) -> Tensor:
        """The random number of each active slot's next draw: [n] float64."""
        counts = self._ints[: self.active, COUNT]
        return self._uniforms[: self.active].gather(1, counts[:, None])[:, 0]

    def below_minimum(self) -> tuple[Tensor, Tensor] | None:
        """(rows, their stop tokens padded with -1) that may not stop yet; None when no row is held back."""
        if not self._held_back:
            return None
        ints = self._ints[: self.active]
        rows = (ints[:, COUNT] < ints[:, MINIMUM]).nonzero()[:, 0]
        return (rows, self._stops[rows]) if len(rows) else None

    def add(self, requests: list[Request]) -> None:
        """Take in requests whose first token is about to be sampled."""
        first, last = self.active, self.active + len(requests)
        assert last <= self.size, "more requests than free slots"
        self._widen_stops(max(len(request.stop_ids) for request in requests))
        width = self._stops.shape[1]
        ints, floats, stops = [], [], []
        for request in requests:
            params = request.params
            greedy = int(params.greedy)
            ints.append(
                (len(request.prompt) - 1, 0, request.limit, params.min_tokens, 0, params.top_k, greedy)
            )
            floats.append((1.0 if params.greedy else params.temperature, params.top_p, params.min_p))
            stops.append(request.stop_ids + (-1,) * (width - len(request.stop_ids)))
        self._ints[first:last] = torch.tensor(ints, device=self.device)
        self._floats[first:last] = torch.tensor(floats, device=self.device)
        self._stops[first:last] = torch.tensor(stops, dtype=torch.int64, device=self.device)
        self._draw_uniforms(first, requests)
        self.requests.extend(requests)
        self.controls = self._refresh()

    def record(self, tokens: Tensor, logprobs: Tensor) -> Tensor:
        """Append one token to every active slot; [n] bool, True where the sequence ends with it."""
        ints = self._ints[: self.active]
        counts = ints[:, COUNT, None]
        self._tokens[: self.active].scatter_(1, counts, tokens[:, None])
        self._logprobs[: self.active].scatter_(1, counts, logprobs[:, None])
        ints[:, LAST] = tokens
        ints[:, POSITION : COUNT + 1] += 1
        stopped = (tokens[:, None] == self._stops[: self.active]).any(dim=-1)
        return stopped | (ints[:, COUNT] >= ints[:, LIMIT]) | ~torch.isfinite(logprobs)

    def count(self, row: int) -> int:
        """Tokens that a slot has sampled."""
        return int(self._ints[row, COUNT])

    def sampled(self, row: int) -> tuple[list[int], list[float]]:
        """Everything that a slot has sampled: token ids and their log-probabilities."""
        count = self.count(row)
        return self._tokens[row, :count].tolist(), self._logprobs[row, :count].tolist()

    def release(self, rows: list[int]) -> tuple[Tensor, Tensor, int] | None:
        """Drop `rows`, moving the last active slots into the holes.

        Returns the moves (sources, targets, positions in use) for the cache to follow, or None.
        """
        gone, remaining = set(rows), self.active - len(rows)
        targets = [row for row in rows if row < remaining]
        sources = [row for row in range(remaining, self.active) if row not in gone]
        moves = self._move(sources, targets) if targets else None
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
        del self.requests[remaining:]
        self.controls = self._refresh()
        return moves

    def _move(self, sources: list[int], targets: list[int]) -> tuple[Tensor, Tensor, int]:
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for table in (self._ints, self._floats, self._stops):
            table[target] = table[source]
        limit, used = self._longest_limit, int(self._ints[source, POSITION].max()) + 1
        for table in (self._uniforms, self._tokens, self._logprobs):
            table[target, :limit] = table[source, :limit]
        return source, target, used

    def _widen_stops(self, width: int) -> None:
        if width > self._stops.shape[1]:
            self._stops = torch.nn.functional.pad(self._stops, (0, width - self._stops.shape[1]), value=-1)

    def _draw_uniforms(self, first: int, requests: list[Request]) -> None:
        """A seeded request's numbers come from its seed alone, the others' from the sampler's stream."""
        width = max(request.limit for request in requests)
        table = torch.rand(len(requests), width, generator=self._random, dtype=torch.float64)
        for row, request in enumerate(requests):
            if request.params.seed is not None:
                self._seeded.manual_seed(request.params.seed)
                table[row, : request.limit] = torch.rand(
                    request.limit, generator=self._seeded, dtype=torch.float64
                )
        self._uniforms[first : first + len(requests), :width] = (table * BELOW_ONE).to(self.device)

    def _refresh(self) -> Controls:
        """What depends on which requests are active, not on the step."""
        requests = self.requests
        self._longest_limit = max((request.limit for request in requests), default=0)
        self._held_back = any(request.params.min_tokens for request in requests)
        self.watched = [row for row, request in enumerate(requests) if request.watched]
        filtered = [row for row, request in enumerate(requests) if request.params.filtered]
        ints, floats = self._ints[: self.active], self._floats[: self.active]
        greedy = ints[:, GREEDY].bool()
        return Controls(
            temperature=floats[:, TEMPERATURE],
            top_p=floats[:, TOP_P],
            min_p=floats[:, MIN_P],
            top_k=ints[:, TOP_K],
            greedy=greedy if bool(greedy.any()) else None,
            filtered=torch.tensor(filtered, device=self.device) if filtered else None,
        )
