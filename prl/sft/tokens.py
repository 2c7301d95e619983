"""Conversation -> tokens and the mask of what is learned, by the model's renderer alone.

Learned is what the renderer says the model itself emits (an assistant's content, reasoning, tool calls and
end-of-turn token) and, for other roles on request, their content without any scaffold. Masks go by the
origin of a token, never by its id: an end token that is also the padding token stays learned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from prl.config.sft import LossMaskConfig
from prl.config.training import ModelConfig
from prl.sft.conversation import Conversation

OTHER_ROLES = ("system", "user", "tool")


class Tokens(NamedTuple):
    """Token ids, which of them are learned, and whether the conversation was cut."""

    token_ids: list[int]
    mask: list[bool]
    truncated: bool = False


class ConversationRenderer:
    """Renders conversations for one model.

    Raises ValueError for a renderer that cannot tell what is learned.
    """

    def __init__(self, model: ModelConfig, loss_mask: LossMaskConfig, seq_len: int) -> None:
        from renderers import create_renderer

        from prl.env.renderers import policy_tokenizer, renderer_config
        from prl.model_path import resolve_model_path

        self._tokenizer = policy_tokenizer(resolve_model_path(model))
        self._config = renderer_config(model)
        self._create = create_renderer
        self._name = model.renderer
        self._assistant = loss_mask.assistant
        self._content_roles = frozenset(role for role in OTHER_ROLES if getattr(loss_mask, role))
        self._seq_len = seq_len
        self._by_options: dict[tuple[tuple[str, Any], ...], Any] = {}
        self._check(self._renderer({}))

    def render(self, conversation: Conversation) -> Tokens:
        """Tokens of the conversation, cut at `seq_len`. Raises ValueError if it cannot be rendered.

        The first token is never learned: nothing predicts it.
        """
        from renderers import build_training_sample

        renderer = self._renderer(conversation.options)
        self._check_tools(renderer, conversation)
        try:
            sample = build_training_sample(
                renderer,
                conversation.messages,  # type: ignore[arg-type]
                role_to_mask=lambda turn: self._assistant and turn["role"] == "assistant",
                tools=conversation.tools,  # type: ignore[arg-type]
                content_sft_roles=self._content_roles,
                ensure_final_stop=True,
            )
        except Exception as error:
            raise ValueError(f"the renderer refuses it: {error!r}") from error
        mask = [False, *sample.loss_mask[1 : self._seq_len]]
        cut = len(sample.token_ids) > self._seq_len
        return Tokens(list(sample.token_ids[: self._seq_len]), mask[: len(sample.token_ids)], cut)

    def _renderer(self, options: dict[str, Any]) -> Any:
        """The renderer with `options` in place of its own; each combination is made once."""
        key = tuple(sorted(options.items()))
        if key not in self._by_options:
            unknown = set(options) - set(type(self._config).model_fields)
            if unknown:
                raise ValueError(
                    f"the renderer has no option {', '.join(sorted(unknown))}; "
                    "set data.columns.renderer={} to leave these columns alone"
                )
            try:
                config = type(self._config)(**{**self._config.model_dump(), **options})
            except ValueError as error:
                raise ValueError(f"the renderer refuses {options}: {error}") from error
            self._by_options[key] = self._create(self._tokenizer, config)
        return self._by_options[key]

    def _check(self, renderer: Any) -> None:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        rendered = renderer.render(turns)
        if not rendered.sampled_mask or (self._content_roles and not rendered.is_content):
            raise ValueError(
                f"model.renderer={self._name}: it does not tell which tokens are the assistant's, so nothing "
                "can be learned from it. Choose the model's family, or chatml, or `package.module:Class`"
            )

    def _check_tools(self, renderer: Any, conversation: Conversation) -> None:
        used = conversation.tools or any(turn.get("tool_calls") for turn in conversation.messages)
        if used and not getattr(renderer, "supports_tools", True):
            raise ValueError(
                f"it has tools, which model.renderer={self._name} leaves out; choose one that writes them "
                "(for model=tiny: role-token-tools)"
            )
