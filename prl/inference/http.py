"""What all routes of the engine share: what is served, request bodies, errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from prl.inference.engine_thread import EngineStopped, EngineThread
from prl.inference.request import Request
from prl.inference.sampling_params import SamplingParams
from prl.inference.text import ChatText

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

logger = logging.getLogger(__name__)


class UnknownModel(ValueError):
    """A request names a model that this engine does not serve."""


@dataclass
class Served:
    """The engine behind the routes. A `frozen` one (a teacher) takes no weights."""

    engine: EngineThread
    model: str
    directory: Path
    fingerprint_mode: str = "sampled"
    frozen: bool = False
    _text: ChatText | None = field(default=None, repr=False)

    @property
    def max_model_len(self) -> int:
        return self.engine.sampler.max_length

    async def text(self) -> ChatText:
        """Tokenizer and chat template, loaded when first asked for. Raises ValueError without a tokenizer."""
        if self._text is None:
            self._text = await asyncio.to_thread(ChatText.from_directory, self.directory)
        return self._text

    def check_model(self, body: Mapping[str, Any]) -> None:
        """Raises UnknownModel if the body names another model."""
        if body.get("model") not in (None, self.model):
            raise UnknownModel(
                f"The model `{body['model']}` does not exist; this engine serves `{self.model}`."
            )

    def requests(self, prompt: Any, params: SamplingParams, *, watched: bool = False) -> list[Request]:
        """`params.n` requests for one prompt of token ids. Raises ValueError for a bad prompt."""
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError("the prompt must be a list of token ids")
        sampler = self.engine.sampler
        return [
            sampler.make_request(prompt, params.for_choice(index), watched=watched)
            for index in range(params.n)
        ]


SERVED = web.AppKey("served", Served)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The JSON object in the body. Raises ValueError for anything else."""
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def error_response(status: int, kind: str, message: str) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """400 for what the caller can mend, 404 for another model, 503 for what may pass, 500 for the rest."""
    try:
        return await handler(request)
    except UnknownModel as error:
        return error_response(404, "NotFoundError", str(error))
    except ValueError as error:
        return error_response(400, "BadRequestError", str(error))
    except (FileNotFoundError, EngineStopped) as error:
        return error_response(503, "ServiceUnavailableError", str(error))
    except (web.HTTPException, ConnectionResetError):
        raise
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return error_response(500, "InternalServerError", f"{type(error).__name__}: {error}")
