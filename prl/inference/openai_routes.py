"""`/v1/chat/completions` and `/v1/completions`: text in and out, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from prl.inference.http import SERVED, Served, read_json
from prl.inference.openai_format import Choice, Format, ScoredTokens, count_usage
from prl.inference.request import Completion
from prl.inference.sampling_params import SamplingParams
from prl.inference.text import ChatText, TextStream

Emit = Callable[[Choice, str, ScoredTokens], Awaitable[None]]


@dataclass(slots=True)
class TextCall:
    """A call to one of the two routes: `n` choices for each prompt."""

    prompts: list[list[int]]
    choices: list[Choice]
    wording: Format
    watched: bool
    """Tokens are looked at one by one: to be streamed, or to find a stop string."""


async def chat_completions(request: web.Request) -> web.StreamResponse:
    served = request.app[SERVED]
    body = await read_json(request)
    served.check_model(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    if body.get("top_logprobs"):
        raise ValueError(f"top_logprobs={body['top_logprobs']}: not supported by the embedded engine")
    text = await served.text()
    prompt = await asyncio.to_thread(
        text.encode_chat,
        messages,
        tools=body.get("tools"),
        add_generation_prompt=body.get("add_generation_prompt", True),
        template_kwargs=body.get("chat_template_kwargs"),
    )
    if body.get("max_completion_tokens") is not None:
        body["max_tokens"] = body["max_completion_tokens"]
    return await _answer(request, served, body, _call(served, body, [prompt], text, chat=True))


async def completions(request: web.Request) -> web.StreamResponse:
    served = request.app[SERVED]
    body = await read_json(request)
    served.check_model(body)
    text = await served.text()
    prompts = _prompts(body.get("prompt"), text)
    return await _answer(request, served, body, _call(served, body, prompts, text, chat=False))


def _prompts(prompt: Any, text: ChatText) -> list[list[int]]:
    """Token ids of each prompt: text or ids, one or many."""
    if isinstance(prompt, str):
        return [text.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [prompt]
        if all(isinstance(item, str) for item in prompt):
            return [text.encode(item) for item in prompt]
        if all(isinstance(item, list) for item in prompt):
            return prompt
    raise ValueError("prompt must be text, a list of token ids, or a list of either")


def _call(
    served: Served, body: Mapping[str, Any], prompts: list[list[int]], text: ChatText, *, chat: bool
) -> TextCall:
    params = SamplingParams.from_request(body, served.engine.sampler.model.config.vocab_size)
    stops = _stop_strings(body.get("stop"))
    watched = bool(body.get("stream")) or bool(stops)
    requests = [each for prompt in prompts for each in served.requests(prompt, params, watched=watched)]
    choices = [Choice(index, each, TextStream(text, stops)) for index, each in enumerate(requests)]
    with_logprobs = body.get("logprobs") not in (None, False)
    wording = Format(chat=chat, model=served.model, text=text, with_logprobs=with_logprobs)
    return TextCall(prompts, choices, wording, watched)


async def _answer(
    request: web.Request, served: Served, body: Mapping[str, Any], call: TextCall
) -> web.StreamResponse:
    if body.get("stream"):
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return await _stream(request, served, call, with_usage)
    if call.watched:
        await _follow(served, call.choices, _keep_quiet)
    else:
        completions = await served.engine.complete([choice.request for choice in call.choices])
        for choice, completion in zip(call.choices, completions, strict=True):
            _raise_fault(completion)
            choice.grow(completion.token_ids, completion.logprobs, completion.finish_reason)
    usage = count_usage(call.prompts, call.choices)
    return web.json_response({**call.wording.whole(call.choices), "usage": usage})


async def _stream(
    request: web.Request, served: Served, call: TextCall, with_usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    wording = call.wording

    async def send(event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())

    async def emit(choice: Choice, added: str, tokens: ScoredTokens) -> None:
        await send(wording.chunk([wording.delta(choice, added, tokens)]))

    if wording.chat:
        await send(wording.chunk([wording.opening(choice) for choice in call.choices]))
    try:
        await _follow(served, call.choices, emit)
        if with_usage:
            await send({**wording.chunk([]), "usage": count_usage(call.prompts, call.choices)})
    except RuntimeError as error:  # too late for another status
        await send({"error": {"message": str(error), "type": "InternalServerError", "code": 500}})
    await response.write(b"data: [DONE]\n\n")
    return response


async def _follow(served: Served, choices: list[Choice], emit: Emit) -> None:
    """Grow the choices token by token until all have ended, telling `emit` of every step."""
    unfinished = {choice.request: choice for choice in choices}
    with served.engine.listen(list(unfinished)) as listener:
        while unfinished:
            output = await listener.next()
            choice = unfinished.get(output.request)
            if choice is None:  # a token sampled before a stop string was found
                continue
            before = len(choice.tokens)
            reason = None
            if output.completion is not None:
                _raise_fault(output.completion)
                reason = output.completion.finish_reason
            added = choice.grow(output.token_ids, output.logprobs, reason)
            if choice.finish_reason is not None:
                del unfinished[output.request]
                if output.completion is None:
                    listener.drop(output.request)
            await emit(choice, added, choice.tokens[before:])


async def _keep_quiet(choice: Choice, added: str, tokens: ScoredTokens) -> None:
    """The answer is sent whole, at the end."""


def _raise_fault(completion: Completion) -> None:
    if completion.error:
        raise RuntimeError(completion.error)


def _stop_strings(stop: Any) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise ValueError("stop must be a string or a list of strings")
    return stops
