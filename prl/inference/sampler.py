"""Continuous batching: requests join and leave the running batch between any two tokens."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from prl.inference.dense import DenseDecoder
from prl.inference.receiver import WeightReceiver
from prl.inference.request import Completion, Output, Request
from prl.inference.sampling import ban_tokens, draw, processed_logprobs
from prl.inference.sampling_params import SamplingParams
from prl.inference.slots import Slots
from prl.sync.fingerprint import fingerprint

PREFILL_TOKENS = 8192
"""Padded prompt tokens of one step, beyond its first prompt: the running sequences wait while it is read."""
SCORED_LOGITS = 1 << 22
"""Logits held at once while a prompt is scored."""
NOT_FINITE = "the model's logits are not finite (diverged weights?)"


class Sampler:
    """Samples completions for many requests at once. Not thread-safe: one thread owns it.

    A step reads the prompts of the requests that join, decodes one token of every running sequence and
    draws all rows' next tokens together. Weights change between steps only; sequences in flight go on
    with the keys and values that they have.
    """

    def __init__(self, model: DenseDecoder, *, max_slots: int, seed: int, version: int = 0) -> None:
        self.model = model
        self.receiver = WeightReceiver(model.weights)
        self.version = version
        self.max_length = model.max_length
        self.slots = Slots(max_slots, model.max_length, model.device, seed)
        self.cache = model.new_cache(max_slots)
        self.waiting: deque[Request] = deque()
        self.prompt_tokens = 0
        self.generated_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.slots.active)

    def make_request(
        self, prompt: Sequence[int], params: SamplingParams, *, watched: bool = False
    ) -> Request:
        """A request for one completion of `prompt`. Raises ValueError if it cannot be served.

        The prompt must leave room for one token, except when it is only scored (`prompt_logprobs` with
        `max_tokens` 1): then it may fill the whole context.
        """
        vocab = self.model.config.vocab_size
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"the prompt holds token ids outside [0, {vocab})")
        room = self.max_length - len(prompt)
        if room == 0 and params.prompt_logprobs and params.max_tokens == 1:
            room = 1
        if room < 1:
            raise ValueError(
                f"This model's maximum context length is {self.max_length} tokens. However, the prompt has "
                f"{len(prompt)} tokens and leaves no room for a completion."
            )
        eos = () if params.ignore_eos else self.model.config.eos_token_ids
        return Request(
            prompt=tuple(prompt),
            params=params,
            watched=watched,
            limit=min(params.max_tokens or room, room),
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
        )

    def submit(self, *requests: Request) -> None:
        self.waiting.extend(requests)

    def cancel(self, *requests: Request) -> None:
        """Forget requests; their slots are free before the next step. One that has ended is left alone."""
        for request in requests:
            request.cancelled = True
            if request in self.waiting:
                self.waiting.remove(request)

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Advance every running sequence by one token; what the step brought, per request concerned."""
        self._drop_cancelled()
        running = self.slots.active
        states = []
        if running:
            states.append(self.model.decode(self.slots.last_tokens, self.slots.positions, self.cache))
        if joining := self._admit():
            states.append(self._prefill(joining, first_slot=running))
        if not states:
            return []
        logits = self.model.logits(torch.cat(states))
        return self._advance(logits)

    def update_weights(self, directory: Path, version: int, mode: str) -> str:
        """Load a published version in place; the fingerprint of what is served now.

        Raises ValueError if the weights do not fit (nothing has changed), FileNotFoundError if they are not
        there, TornWeights if loading broke off.
        """
        self.receiver.apply(directory)
        self.version = version
        for row, request in enumerate(self.slots.requests):
            request.mark_version(version, self.slots.count(row))
        return self.fingerprint(mode)

    def fingerprint(self, mode: str) -> str:
        """Fingerprint of the weights in the memory that the engine computes with."""
        return fingerprint(self.receiver.proof(), mode)

    def _admit(self) -> list[Request]:
        """Requests that join now: first come first served, bounded by slots and prompt tokens."""
        joining: list[Request] = []
        distinct: set[tuple[int, ...]] = set()
        longest = 0
        while self.waiting and len(joining) < self.slots.free:
            prompt = self.waiting[0].prompt
            longest = max(longest, len(prompt))
            distinct.add(prompt)
            if joining and len(distinct) * longest > PREFILL_TOKENS:
                break
            joining.append(self.waiting.popleft())
        return joining

    def _prefill(self, requests: list[Request], first_slot: int) -> Tensor:
        """Read the prompts, each distinct one once; states [requests, hidden] of their last tokens."""
        numbers: dict[tuple[int, ...], int] = {}
        source = [numbers.setdefault(request.prompt, len(numbers)) for request in requests]
        prompts = list(numbers)
        longest = max(map(len, prompts))
        device = self.model.device
        ids = torch.tensor([prompt + (0,) * (longest - len(prompt)) for prompt in prompts], device=device)
        rows = torch.tensor(source, device=device)
        states = self.model.prefill(ids, self.cache, first_slot, rows)
        scores: dict[int, list[float]] = {}
        for number, request in zip(source, requests, strict=True):
            request.mark_version(self.version, 0)
            if request.params.prompt_logprobs:
                if number not in scores:
                    scores[number] = self._score(ids[number, : len(request.prompt)], states[number])
                request.prompt_logprobs = scores[number]
        self.prompt_tokens += sum(len(request.prompt) for request in requests)
        self.slots.add(requests)
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        return states[torch.arange(len(prompts), device=device), ends][rows]

    def _score(self, ids: Tensor, states: Tensor) -> list[float]:
        """Log-probability of each token of `ids` [n] given those before it; the first has none: 0.0."""
        scores = [0.0]
        chunk = max(1, SCORED_LOGITS // self.model.config.vocab_size)
        for start in range(0, len(ids) - 1, chunk):
            targets = ids[start + 1 : start + 1 + chunk]
            logits = self.model.logits(states[start : start + len(targets)])
            logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]
            scores.extend(logprobs.tolist())
        return scores

    def _advance(self, logits: Tensor) -> list[Output]:
        slots = self.slots
        if held := slots.below_minimum():
            ban_tokens(logits, *held)
        logprobs = processed_logprobs(logits, slots.controls)
        tokens, chosen = draw(logprobs, slots.uniforms, slots.controls.greedy)
        ended = slots.record(tokens, chosen).nonzero()[:, 0].tolist()
        self.generated_tokens += slots.active
        outputs = self._watch(tokens, chosen)
        for row in ended:
            request = slots.requests[row]
            output = outputs.setdefault(row, Output(request))
            output.completion = self._complete(row, request)
        self._release(ended)
        return list(outputs.values())

    def _watch(self, tokens: Tensor, logprobs: Tensor) -> dict[int, Output]:
        """Row -> the new token, for requests that follow token by token."""
        return {
            row: Output(self.slots.requests[row], [int(tokens[row])], [float(logprobs[row])])
            for row in self.slots.watched
        }

    def _complete(self, row: int, request: Request) -> Completion:
        token_ids, logprobs = self.slots.sampled(row)
        error = None
        if not math.isfinite(logprobs[-1]):
            error = NOT_FINITE
            self.cache.clear(row)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="stop" if token_ids[-1] in request.stop_ids else "length",
            weight_versions=request.version_spans(len(token_ids)),
            prompt_logprobs=request.prompt_logprobs,
            error=error,
        )

    def _drop_cancelled(self) -> None:
        self._release([row for row, request in enumerate(self.slots.requests) if request.cancelled])

    def _release(self, rows: list[int]) -> None:
        if rows and (moves := self.slots.release(rows)):
            self.cache.move(*moves)
