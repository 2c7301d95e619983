"""Text in and out of the engine: tokenizer, chat template, incremental decoding with stop strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatText:
    """Tokenizer and chat template of a model directory."""

    def __init__(self, tokenizer: Tokenizer, template: str | None, special_tokens: Mapping[str, str]) -> None:
        self.tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._template = None if template is None else _environment().from_string(template)

    @classmethod
    def from_directory(cls, directory: Path) -> ChatText:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ValueError without a
        tokenizer and for a template that does not compile."""
        if not (directory / "tokenizer.json").is_file():
            raise ValueError(f"{directory} has no tokenizer.json: this engine takes token ids only")
        config_file = directory / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        special = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        try:
            return cls(
                Tokenizer.from_file(str(directory / "tokenizer.json")), _template(directory, config), special
            )
        except TemplateError as error:
            raise ValueError(f"{directory}: the chat template does not compile: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with what the tokenizer adds by itself."""
        return self.tokenizer.encode(text).ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. Raises ValueError for messages that the template refuses."""
        if self._template is None:
            raise ValueError("the model has no chat template: use /v1/completions or /inference/v1/generate")
        try:
            text = self._template.render(
                **self._special_tokens,
                **(template_kwargs or {}),
                messages=[_plain_message(message) for message in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateError as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without special tokens."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """Text of one token, special or not."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


class TextStream:
    """Turns tokens into text as they come, and ends at the first stop string."""

    def __init__(self, text: ChatText, stops: Sequence[str] = ()) -> None:
        self._text = text
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = stops
        self._token_ids: list[int] = []
        self._decoded = ""
        self._emitted = 0
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that is safe to show now; what may be the start of a stop string is held back."""
        self._token_ids.append(token_id)
        self._decoded += self._stream.step(self._text.tokenizer, token_id) or ""
        cut = min((at for stop in self._stops if (at := self._decoded.find(stop)) >= 0), default=None)
        if cut is not None:
            self.stopped = True
            self._decoded = self._decoded[:cut]
            return self._emit(cut)
        return self._emit(len(self._decoded) - self._held_back())

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        if not self.stopped:
            whole = self._text.decode(self._token_ids)
            if whole.startswith(self._decoded):
                self._decoded = whole  # adds what an unfinished character decodes to
        return self._emit(len(self._decoded))

    def _emit(self, end: int) -> str:
        piece = self._decoded[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return piece

    def _held_back(self) -> int:
        """Length of the longest tail that some stop string starts with."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._decoded)), 0, -1):
            if any(stop.startswith(self._decoded[-size:]) for stop in self._stops):
                return size
        return 0


def _environment() -> ImmutableSandboxedEnvironment:
    """Templates are untrusted code from model repositories: sandboxed, with the names they expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _template(directory: Path, config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text content as one string, tool arguments as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: each needs a role, got {message!r}")
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(_text_part(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError("messages: content must be text or a list of text parts")
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def _text_part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError("messages: only text parts are supported by the embedded engine")


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except json.JSONDecodeError as error:
            raise ValueError(f"messages: tool call arguments are not JSON: {error}") from error
    return {**call, "function": function}
