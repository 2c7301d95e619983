"""Renderer of plain ChatML: `<|im_start|>role\\ncontent<|im_end|>\\n`, for any tokenizer with those tokens.

No tools and no reasoning split: models trained for those have a family renderer of their own.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from renderers import BaseRendererConfig

from prl.env.delimited_renderer import DelimitedRenderer


class ChatMLConfig(BaseRendererConfig):
    """No options."""

    name: Literal["chatml"] = "chatml"


class ChatMLRenderer(DelimitedRenderer):
    """ChatML without a default system message."""

    config_class: ClassVar[type[BaseRendererConfig]] = ChatMLConfig
    opening = "<|im_start|>{role}\n"
    close = "<|im_end|>"
    separator = "\n"
