"""Renderer of role-token chat formats: `<|role|>content<|end|>`, as the bundled model `tiny` speaks."""

from __future__ import annotations

from typing import ClassVar, Literal

from renderers import BaseRendererConfig

from prl.env.delimited_renderer import DelimitedRenderer


class RoleTokenConfig(BaseRendererConfig):
    """No options."""

    name: Literal["role-token"] = "role-token"


class RoleTokenRenderer(DelimitedRenderer):
    """One token opens a message, one closes it; nothing stands between messages."""

    config_class: ClassVar[type[BaseRendererConfig]] = RoleTokenConfig
    opening = "<|{role}|>"
    close = "<|end|>"
