"""`POST /inference/v1/generate`: tokens in, tokens and their log-probabilities out."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Sequence

from aiohttp import web

from prl.inference.http import SERVED, error_response, read_json
from prl.inference.request import Completion
from prl.inference.sampling_params import SamplingParams

_ids = itertools.count()
_prefix = uuid.uuid4().hex[:12]


async def generate(request: web.Request) -> web.Response:
    """Sample `sampling_params.n` completions of `token_ids`. Text never appears here.

    A choice has `token_ids` (the stop token included), one log-probability per token, the finish reason,
    and `weight_versions`: which policy version sampled how many of the tokens.
    """
    served = request.app[SERVED]
    body = await read_json(request)
    served.check_model(body)
    raw = {} if body.get("sampling_params") is None else body["sampling_params"]
    if not isinstance(raw, dict):
        raise ValueError("sampling_params must be an object")
    params = SamplingParams.from_request(raw, served.engine.sampler.model.config.vocab_size)
    requests = served.requests(body.get("token_ids"), params)
    completions = await served.engine.complete(requests)
    if fault := next((completion.error for completion in completions if completion.error), None):
        return error_response(500, "InternalServerError", fault)
    return web.Response(body=_answer(requests[0].prompt, completions), content_type="application/json")


def _answer(prompt: Sequence[int], completions: Sequence[Completion]) -> bytes:
    """The JSON answer, written by hand: dumping one object per token takes several times as long."""
    choices = ",".join(_choice(index, completion) for index, completion in enumerate(completions))
    sampled = sum(len(completion.token_ids) for completion in completions)
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": sampled,
        "total_tokens": len(prompt) + sampled,
    }
    scores = completions[0].prompt_logprobs
    scored = "" if scores is None else f',"prompt_logprobs":{_prompt_logprobs(prompt, scores)}'
    identity = f"{_prefix}-{next(_ids)}"
    return f'{{"request_id":"{identity}","choices":[{choices}],"usage":{json.dumps(usage)}{scored}}}'.encode()


def _choice(index: int, completion: Completion) -> str:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    content = ",".join([f'{{"token":"token_id:{token}","logprob":{value:.9g}}}' for token, value in pairs])
    spans = [{"version": span.version, "tokens": span.tokens} for span in completion.weight_versions]
    return (
        f'{{"index":{index},"token_ids":{completion.token_ids},"finish_reason":"{completion.finish_reason}",'
        f'"logprobs":{{"content":[{content}]}},"weight_versions":{json.dumps(spans)}}}'
    )


def _prompt_logprobs(prompt: Sequence[int], scores: list[float]) -> str:
    """null for the first token, then one map per token with its own entry."""
    pairs = zip(prompt[1:], scores[1:], strict=True)
    entries = [f'{{"{token}":{{"logprob":{value:.9g}}}}}' for token, value in pairs]
    return f"[{','.join(['null', *entries])}]"
