"""Renderer of chat formats in which fixed tokens open and close every message.

    opening(role) content close separator

It fills the masks that training needs and extends a conversation without re-tokenising what the model
sampled, so that a rollout of many turns stays one branch. Subclasses say what the fixed tokens are.
"""

from __future__ import annotations

from typing import Any, ClassVar

from renderers import BaseRendererConfig, ParsedResponse, RenderedTokens
from renderers.base import extract_message_tool_names, reject_assistant_in_extension

Message = dict[str, Any]


class DelimitedRenderer:
    """The protocol of `renderers.Renderer` for one delimited format.

    In every result `token_ids`, `message_indices` (-1 = scaffold), `sampled_mask` (what the model emits: an
    assistant's content and its closing token) and `is_content` (bodies, not scaffold) have equal length.
    """

    config_class: ClassVar[type[BaseRendererConfig]]
    opening: ClassVar[str] = ""
    """What opens a message, with `{role}` in it."""
    close: ClassVar[str] = ""
    """The token that ends a message, and with it the model's turn."""
    separator: ClassVar[str] = ""
    """Scaffold between messages."""

    supports_tools = False
    is_multimodal = False
    is_prefix_stable = True
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Any, config: BaseRendererConfig | None = None) -> None:
        self.tokenizer = tokenizer
        self.config = config or self.config_class()
        self.close_id = self._special(self.close)
        eos = tokenizer.eos_token_id
        self.stop_ids = [self.close_id] if eos in (None, self.close_id) else [self.close_id, eos]
        self.separator_ids = self._encode(self.separator)
        self.prompt_ids = self._encode(self.opening.format(role="assistant"))

    def render(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """All messages, then the opening of the assistant's turn if a prompt is wanted."""
        out = _empty(messages)
        for index, message in enumerate(messages):
            self._message(out, index, message)
        if add_generation_prompt:
            _emit(out, self.prompt_ids, -1)
        return out

    def render_ids(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.render(messages, add_generation_prompt=add_generation_prompt).token_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: Any = None,
    ) -> RenderedTokens | None:
        """The next prompt: every previous token as it was, then `new_messages` and the generation prompt.

        A turn that was cut is closed first. None (render from scratch) if `new_messages` is empty or
        holds an assistant message.
        """
        if not previous_prompt_ids or not new_messages or reject_assistant_in_extension(new_messages):
            return None
        out = _empty(new_messages)
        _emit(out, [*previous_prompt_ids, *previous_completion_ids], -1)
        if out.token_ids[-1] not in self.stop_ids:
            _emit(out, [self.close_id], -1)
        _emit(out, self.separator_ids, -1)
        for index, message in enumerate(new_messages):
            self._message(out, index, message)
        _emit(out, self.prompt_ids, -1)
        return out

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Text up to the first stop token, special tokens stripped: they must never earn a reward."""
        end = next((i for i, token in enumerate(token_ids) if token in self.stop_ids), len(token_ids))
        return ParsedResponse(content=self.tokenizer.decode(token_ids[:end], skip_special_tokens=True))

    def get_stop_token_ids(self) -> list[int]:
        return list(self.stop_ids)

    def _message(self, out: RenderedTokens, index: int, message: Message) -> None:
        role, text = message["role"], _text(message.get("content"))
        if role == "assistant":
            _emit(out, self.prompt_ids, index)
            _emit(out, [*self._encode(text), self.close_id], index, sampled=True, content=True)
        else:
            opening, body = self._split(self.opening.format(role=role), text)
            _emit(out, opening, index)
            _emit(out, body, index, content=True)
            _emit(out, [self.close_id], index)
        _emit(out, self.separator_ids, index)

    def _split(self, opening: str, text: str) -> tuple[list[int], list[int]]:
        """Ids of `opening + text`, encoded together as chat templates do, cut where the text starts."""
        encoded = self.tokenizer(opening + text, add_special_tokens=False, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        cut = sum(start < len(opening) for start, _ in encoded["offset_mapping"])
        return ids[:cut], ids[cut:]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _special(self, token: str) -> int:
        ids = self._encode(token)
        if len(ids) != 1:
            raise ValueError(
                f"{type(self).__name__} needs {token!r} as one token; the tokenizer of "
                f"{self.tokenizer.name_or_path!r} makes {len(ids)} of it. Choose another model.renderer."
            )
        return ids[0]


def _empty(messages: list[Message]) -> RenderedTokens:
    return RenderedTokens(
        message_roles=[message["role"] for message in messages],
        message_tool_names=extract_message_tool_names(messages),  # type: ignore[arg-type]
    )


def _emit(
    out: RenderedTokens, ids: list[int], index: int, *, sampled: bool = False, content: bool = False
) -> None:
    out.token_ids += ids
    out.message_indices += [index] * len(ids)
    out.sampled_mask += [sampled] * len(ids)
    out.is_content += [content] * len(ids)


def _text(content: Any) -> str:
    """The text of a message body: a string, null, or a list of text parts. Raises ValueError on media."""
    if content is None or isinstance(content, str):
        return content or ""
    if other := {part["type"] for part in content} - {"text"}:
        raise ValueError(f"this renderer takes text only, got content of type {', '.join(sorted(other))}")
    return "".join(part["text"] for part in content)
