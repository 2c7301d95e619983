"""`/inference/v1/generate` answered from vLLM's engine client, without a Python object for each token.

vLLM's own handler wakes a task at every step of every request, decodes text that nobody reads, and
answers with two validated objects per token: a few hundred requests keep its one process busier than the GPU.
Here the engine reports once, when a request is done, and the answer is written from flat lists. Its form is
the same in all releases: `token_id:N` with the token's log-probability (newer ones name tokens otherwise).
What cannot be expressed (streams, stop strings, images, alternatives to the sampled tokens) is left to vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import uuid
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

LEFT_TO_VLLM = ("stream", "features", "content_parts", "kv_transfer_params", "ec_transfer_params")
"""Keys of a body that ask for more than tokens in, tokens out."""
LEFT_PARAMS = ("stop", "logprob_token_ids", "prompt_logprob_token_ids", "trace_decode_token_ids")
"""Sampling parameters that need text or have answers of their own."""
FLOOR = -9999.0
"""Stands for what JSON has no number for, as in vLLM; clients refuse it."""
ENTRY = '{"token":"token_id:%d","logprob":%.9g},'
"""A token of an answer. Nine digits give every float32 back."""
INLINE_TOKENS = 8192
"""Longer answers are written in a thread, so that they do not hold up the others."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


@dataclass(frozen=True)
class Asked:
    """A request that is served here. `params` are as in the body, without those that are null."""

    token_ids: list[int]
    params: dict[str, Any]
    priority: int


def expressible(body: bytes, model: str) -> Asked | None:
    """The request, or None for one that vLLM's own handler must answer or refuse."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    if not isinstance(asked, dict) or asked.get("model") != model:
        return None
    params, tokens, priority = asked.get("sampling_params"), asked.get("token_ids"), asked.get("priority")
    if not isinstance(params, dict) or not isinstance(tokens, list) or not tokens:
        return None
    if not all(type(token) is int and token >= 0 for token in tokens):
        return None
    params = {key: value for key, value in params.items() if value is not None}
    if any(asked.get(key) for key in LEFT_TO_VLLM) or any(params.get(key) for key in LEFT_PARAMS):
        return None
    if asked.get("output_mode", "tokens") != "tokens" or params.get("logprobs", 0) not in (0, 1):
        return None
    return Asked(tokens, params, priority if type(priority) is int else 0)


async def generate(state: Any, asked: Asked, salt: str, adapter: Any, receive: Receive) -> bytes | None:
    """The JSON answer; None if the client left, whose request is then dropped.

    Raises ValueError for parameters or prompts that the engine refuses, and what breaks the engine.
    """
    from vllm import exceptions
    from vllm.inputs.engine import tokens_input

    refusals = (ValueError, getattr(exceptions, "VLLMError", ValueError))  # the latter in newer releases
    client = state.engine_client
    identity = uuid.uuid4().hex
    by_priority = client.vllm_config.scheduler_config.policy == "priority"
    try:
        outputs = client.generate(
            tokens_input(asked.token_ids, cache_salt=salt),
            engine_params(asked.params),
            f"prl-{identity}",
            lora_request=adapter,
            priority=asked.priority if by_priority else 0,
        )
        final = await _unless_left(_last(outputs), receive)
    except refusals as error:
        raise ValueError(str(error)) from error
    if final is None:
        return None
    if sum(len(output.token_ids) for output in final.outputs) > INLINE_TOKENS:
        return await asyncio.to_thread(answer, identity, final)
    return answer(identity, final)


def engine_params(params: dict[str, Any]) -> Any:
    """vLLM's SamplingParams that report once and keep log-probabilities in flat lists.

    Only the sampled token's is computed. Keys that this release does not know are ignored; without
    `max_tokens` a completion may fill the context. Raises ValueError for values that are refused.
    """
    import msgspec
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    known = {
        key: value
        for key, value in params.items()
        if key in SamplingParams.__struct_fields__ and not key.startswith("_")
    }
    try:
        made = msgspec.convert({"max_tokens": None, **known}, SamplingParams)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    if made.logprobs is not None:
        made.logprobs = 0
    made.detokenize, made.flat_logprobs, made.skip_clone = False, True, True
    made.output_kind = RequestOutputKind.FINAL_ONLY
    return made


def answer(identity: str, final: Any) -> bytes:
    """The response to a finished `RequestOutput`. Raises RuntimeError if the engine failed on it."""
    outputs = sorted(final.outputs, key=lambda output: output.index)
    choices = ",".join([_choice(output) for output in outputs])
    prompt, sampled = len(final.prompt_token_ids), sum(len(output.token_ids) for output in outputs)
    usage = f'"prompt_tokens":{prompt},"completion_tokens":{sampled},"total_tokens":{prompt + sampled}'
    scores = (
        "" if final.prompt_logprobs is None else f',"prompt_logprobs":{_positions(final.prompt_logprobs)}'
    )
    return f'{{"request_id":"{identity}","choices":[{choices}],"usage":{{{usage}}}{scores}}}'.encode()


def _choice(output: Any) -> str:
    if output.finish_reason == "error":
        raise RuntimeError("the engine failed on this request")
    tokens = list(output.token_ids)
    spans = [
        {"version": span.version, "start": span.start, "end": span.end}
        for span in getattr(output, "weight_versions", None) or ()
    ]
    return (
        f'{{"index":{output.index},"token_ids":{tokens},"finish_reason":"{output.finish_reason or "stop"}",'
        f'"logprobs":{_logprobs(tokens, output.logprobs)},"weight_versions":{json.dumps(spans)}}}'
    )


def _logprobs(tokens: Sequence[int], flat: Any) -> str:
    """The first entry of each position is the sampled token's. One format for all: when hundreds of requests
    end in the same step, the time that this takes is what the last of them waits."""
    if flat is None:
        return "null"
    values = [flat.logprobs[start] for start in flat.start_indices]
    if values and not (math.isfinite(sum(values)) and min(values) > FLOOR):
        values = [value if value > FLOOR else FLOOR for value in values]
    pairs = chain.from_iterable(zip(tokens, values, strict=True))
    return f'{{"content":[{((ENTRY * len(values)) % tuple(pairs))[:-1]}]}}'


def _positions(flat: Any) -> str:
    """null for a position without entries (the first), else a map of token -> log-probability and rank."""
    ids, values, ranks = flat.token_ids, flat.logprobs, flat.ranks
    positions = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        entries = {  # the prompt's own token may be among the likeliest, and is then there twice
            ids[i]: f'"{ids[i]}":{{"logprob":{_number(values[i])},"rank":{ranks[i]}}}'
            for i in range(start, end)
        }
        positions.append(f"{{{','.join(entries.values())}}}" if entries else "null")
    return f"[{','.join(positions)}]"


def _number(value: float) -> str:
    """NaN compares false, so it becomes the floor too."""
    return f"{value:.9g}" if value > FLOOR else str(FLOOR)


async def _last(outputs: Any) -> Any:
    final = None
    async for output in outputs:
        final = output
    assert final is not None, "an engine's stream ends with the finished request"
    return final


async def _unless_left(work: Any, receive: Receive) -> Any:
    """The result of `work`; None, with `work` cancelled, if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                if not task.done():
                    await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
