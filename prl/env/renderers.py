"""`model.renderer` -> how messages become tokens."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from renderers import BaseRendererConfig, CustomRendererConfig, Renderer, config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP, load_tokenizer

from prl.assets import bundled_model, bundled_models
from prl.config.training import ModelConfig
from prl.import_path import load_object
from prl.model_path import resolve_model_path

OWN = {
    "role-token": "prl.env.role_token_renderer.RoleTokenRenderer",
    "role-token-tools": "prl.env.tool_renderer.RoleTokenToolsRenderer",
    "chatml": "prl.env.chatml_renderer.ChatMLRenderer",
}
"""Renderers that prl adds to the families of `renderers`, by import path."""

FAST_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def renderer_names() -> list[str]:
    """What `model.renderer` may be, besides `package.module:Class`."""
    return ["auto", *OWN, "default", *sorted(set(MODEL_RENDERER_MAP.values()))]


def renderer_config(model: ModelConfig) -> BaseRendererConfig:
    """Config of the renderer that `model.renderer` names.

    `auto` takes an exact match only: the model's Hugging Face id in the table of `renderers`, or the chat
    template of a bundled model. Raises ValueError on no match and on an unknown name.
    """
    renderer = model.renderer if model.renderer != "auto" else _automatic(model)
    if renderer in OWN:
        return CustomRendererConfig(import_path=OWN[renderer])
    if ":" in renderer:
        return _custom(renderer)
    if renderer not in renderer_names():
        near = difflib.get_close_matches(renderer, renderer_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"model.renderer={renderer!r}: {hint}{_choices()}")
    config = config_from_name(renderer)
    assert config is not None, "only `auto` has no config"
    return config


def load_renderer(model: ModelConfig) -> Renderer:
    """The renderer itself, on the model's tokenizer. Same errors as `renderer_config`."""
    path = resolve_model_path(model)
    return create_renderer(policy_tokenizer(path), renderer_config(model))


def policy_tokenizer(model_path: Path) -> Any:
    """The tokenizer in `model_path`.

    A self-contained fast tokenizer is loaded as such: `AutoTokenizer` would return the same but import torch.
    """
    declared = _tokenizer_config(model_path)
    if declared.get("tokenizer_class") in FAST_CLASSES and "auto_map" not in declared:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(model_path))
    return load_tokenizer(str(model_path))


def chat_template(model_path: Path) -> str | None:
    """The chat template that `from_pretrained` would find in `model_path`."""
    if (jinja := model_path / "chat_template.jinja").is_file():
        return jinja.read_text(encoding="utf-8")
    return _tokenizer_config(model_path).get("chat_template")


def _tokenizer_config(model_path: Path) -> dict[str, Any]:
    config = model_path / "tokenizer_config.json"
    return json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}


def _automatic(model: ModelConfig) -> str:
    """Name of the renderer that is known to fit. Raises ValueError if none is."""
    if family := MODEL_RENDERER_MAP.get(model.name):
        return family
    path = resolve_model_path(model)
    template = chat_template(path)
    if template and template in [chat_template(bundled_model(name)) for name in bundled_models()]:
        return "role-token"
    raise ValueError(
        f"model.renderer=auto knows no renderer for model {model.name!r} at {path}, and a wrong guess would "
        f"train on other tokens than were sampled. {_choices()}"
    )


def _custom(path: str) -> BaseRendererConfig:
    load_object(path, "model.renderer")
    try:
        return CustomRendererConfig(import_path=path.replace(":", "."))
    except (TypeError, ValueError) as error:
        raise ValueError(f"model.renderer={path!r}: not a renderer class: {error}") from error


def _choices() -> str:
    return f"Choose one of {', '.join(renderer_names())}, or `package.module:Class`."


def parity_gap(renderer: Any, tokenizer: Any) -> str | None:
    """How the renderer and the tokenizer's own chat template differ on a short conversation, if they do."""
    conversation = [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    ours = renderer.render_ids(conversation, add_generation_prompt=True)
    theirs = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    if ours == list(theirs):
        return None
    return f"renderer: {tokenizer.decode(ours)!r}; chat template: {tokenizer.decode(theirs)!r}"
