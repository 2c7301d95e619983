"""The policy: a Hugging Face causal LM whose forward returns logprobs and entropies of a packed row."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from prl.config.training import ModelConfig, TrainerConfig
from prl.model_path import resolve_model_path
from prl.trainer.attention import PACKED, register_packed_attention
from prl.trainer.lm_head import EAGER, compiled_kernels, install_chunked_head, shift_right
from prl.trainer.recompute import check_compiler, prepare_layers
from prl.trainer.zero import initialise_shards

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""Config keys of models that change their logits after the head; the chunked head would skip that."""


def compute_dtype(trainer: TrainerConfig, device: torch.device) -> torch.dtype:
    """Type of forward and backward. `auto`: bfloat16 on GPUs, float32 on CPUs."""
    if trainer.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[trainer.dtype]


def load_policy(
    model: ModelConfig,
    trainer: TrainerConfig,
    device: torch.device,
    seed: int,
    sharded: Callable[[], AbstractContextManager[Any]] | None = None,
) -> PreTrainedModel:
    """The model of `model` in its compute type, in train mode, with the forward of `policy_forward`.

    `random_init` initialises from `seed` and needs config.json only. With `sharded`, a context that takes
    every parameter apart as soon as it exists, those of files are left undefined: read them into the shards.
    Raises ValueError for a model or a setting that the trainer cannot serve exactly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.utils.logging import disable_progress_bar

    if trainer.compile:
        check_compiler(device)
    disable_progress_bar()
    path = resolve_model_path(model)
    dtype = compute_dtype(trainer, device)
    config = _model_config(path, model.num_layers)
    config._attn_implementation = attention_name(trainer.attn, config, device)
    if sharded:
        with no_init_weights(), sharded():  # weights are gone as soon as they are made
            policy = AutoModelForCausalLM.from_config(config, dtype=dtype)
        policy.tie_weights()  # a part of what was left out
        if model.random_init:
            initialise_shards(policy, seed)
        _renew_rotary(policy)
    elif model.random_init:
        torch.manual_seed(seed)
        with device:
            policy = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        policy = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, local_files_only=True)
    size = sum(getattr(p, "ds_numel", p.numel()) for p in policy.parameters())
    log.info("%s from %s: %s parameters", type(policy).__name__, path, f"{size:,}")
    return make_policy(policy, trainer)


def make_policy(policy: PreTrainedModel, trainer: TrainerConfig) -> PreTrainedModel:
    """Put packed rows, chunked head, recomputation and compilation into a loaded causal LM, in place."""
    policy.train()
    policy.sequence_group = None
    policy.config.use_cache = False
    kernels = compiled_kernels() if trainer.compile else EAGER
    install_chunked_head(policy.get_output_embeddings(), trainer.lm_head_chunk, kernels)
    policy.forward = types.MethodType(policy_forward, policy)
    prepare_layers(policy, trainer)
    return policy


def policy_forward(
    self: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    temperatures: Tensor,
    sequence_lengths: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """(logprobs, entropy) of one packed row, float32 [n] each; index i speaks about token i.

    input_ids and position_ids [n] int64, positions restart at 0 in every sequence; temperatures [n].
    Sequences are isolated: transformers finds their borders in the positions because it is given neither a
    mask nor a cache; prl's own kernel is given their lengths. Slot 0 of every sequence is meaningless (it
    would be predicted by its neighbour); slot 0 of the row holds a uniform guess. With a `sequence_group`
    the ranks of it pass the same row and get the same values.
    """
    group, size = self.sequence_group, len(input_ids)
    labels, following = _shift_left(input_ids, 0), _shift_left(temperatures, 1.0)
    if group:
        if padding := -size % group.size:
            sequence_lengths = (*sequence_lengths, padding)
        input_ids, position_ids, labels = (group.part(row, 0) for row in (input_ids, position_ids, labels))
        following = group.part(following, 1.0)
    packed = self.config._attn_implementation == PACKED
    extra = {"sequence_lengths": sequence_lengths, "sequence_group": group} if packed else {}
    outputs = self.base_model(
        input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, **extra
    )
    head = self.get_output_embeddings()
    logprobs, entropy = head(outputs.last_hidden_state[0], labels, following)
    if group:
        logprobs, entropy = (group.whole(values)[:size] for values in (logprobs, entropy))
    return shift_right(logprobs, entropy, self.config.get_text_config().vocab_size)


def _renew_rotary(policy: PreTrainedModel) -> None:
    """Frequencies in float32: a context that shards parameters turns all buffers into the compute type."""
    for name, module in list(policy.named_modules()):
        if hasattr(module, "inv_freq"):
            parent = policy.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=module.config))


def attention_name(choice: str, config: PretrainedConfig, device: torch.device) -> str:
    """transformers' name of the attention kernel for `trainer.attn`.

    `auto` is prl's packed kernel where the model's attention is plain and causal, else sdpa; `flash` is the
    packed kernel on a GPU, an error elsewhere; `sdpa` and `flex` are transformers' own with a mask.
    """
    text = config.get_text_config()
    plain = set(getattr(text, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    if choice == "flash" and not (device.type == "cuda" and plain):
        why = (
            "it needs a GPU" if device.type != "cuda" else f"{config.model_type} has sliding or linear layers"
        )
        raise ValueError(f"trainer.attn=flash: {why}; use trainer.attn=auto")
    if choice == "flex" and device.type != "cuda":
        raise ValueError("trainer.attn=flex: torch has no backward of it on CPUs; use trainer.attn=auto")
    if choice == "flash" or (choice == "auto" and plain):
        return register_packed_attention()
    return "flex_attention" if choice == "flex" else "sdpa"


def _model_config(path: Path, num_layers: int | None) -> PretrainedConfig:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    changed = [key for key in LOGIT_CHANGES if getattr(config, key, None) not in (None, 1, 1.0)]
    if changed:
        raise ValueError(
            f"{config.model_type} changes its logits after the head ({changed[0]}): not supported"
        )
    if num_layers is not None:
        if num_layers > config.num_hidden_layers:
            raise ValueError(
                f"model.num_layers={num_layers}: the model has only {config.num_hidden_layers} layers"
            )
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    return config


def _shift_left(row: Tensor, fill: Any) -> Tensor:
    return torch.cat([row[1:], row.new_full((1,), fill)])
