"""The embedded engine's model: a dense decoder in plain torch, on a static key-value cache.

Computes Qwen3 (query and key norms), Qwen2 (biased projections), Llama and Mistral. Activations are rows
[n, hidden] throughout; only attention knows which rows belong together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.inference.decoder_config import DecoderConfig
from prl.inference.dense_weights import DenseWeights, Layer
from prl.inference.kv_cache import KvCache
from prl.inference.rope import rope_tables, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [n, heads, d], keys [n, kv_heads, d], values [n, kv_heads, d]) -> [n, heads * d]"""


class DenseDecoder:
    """A decoder that serves `weights` with prompts and completions of up to `max_length` tokens."""

    def __init__(self, weights: DenseWeights, max_length: int) -> None:
        config = weights.config
        if max_length > config.max_positions:
            raise ValueError(
                f"inference.max_model_len={max_length}: the model's max_position_embeddings is "
                f"{config.max_positions}; lower inference.max_model_len"
            )
        self.config, self.weights, self.max_length = config, weights, max_length
        self.device = weights.embedding.device
        self.dtype = weights.dtype
        cos, sin = rope_tables(config, max_length, self.device)
        self._cos, self._sin = cos.to(self.dtype), sin.to(self.dtype)
        self._positions = torch.arange(max_length, device=self.device)

    @classmethod
    def from_directory(
        cls,
        directory: Path,
        *,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        num_layers: int | None = None,
        random_init: bool = False,
    ) -> DenseDecoder:
        """Load a Hugging Face directory (config.json and safetensors). Raises ValueError for a model that
        is not served exactly, FileNotFoundError for missing files."""
        config = DecoderConfig.from_directory(directory, num_layers)
        weights = DenseWeights(config, device, dtype)
        if random_init:
            weights.initialise(seed=0)
        else:
            weights.load(directory, strict=False)
        return cls(weights, max_length)

    def new_cache(self, slots: int) -> KvCache:
        return KvCache(self.config, slots, self.max_length, self.device, self.dtype)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: KvCache, first_slot: int, source: Tensor) -> Tensor:
        """Run prompts `ids` [b, length] (padded on the right); the slots from `first_slot` on get the keys
        and values of the prompts that `source` [slots] names. Returns final states [b, length, hidden]."""
        config = self.config
        batch, length = ids.shape
        group = config.num_heads // config.num_kv_heads

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = (x.view(batch, length, config.num_kv_heads, -1) for x in (keys, values))
            cache.store_prompts(layer, keys, values, first_slot, source)
            queries = queries.view(batch, length, config.num_heads, -1).transpose(1, 2)
            keys, values = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (keys, values))
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            return mixed.transpose(1, 2).reshape(batch * length, -1)

        cos, sin = (table[:length].repeat(batch, 1, 1) for table in (self._cos, self._sin))
        return self._forward(ids.reshape(-1), cos, sin, attend).view(batch, length, -1)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, cache: KvCache) -> Tensor:
        """One token for each of the first n slots: `tokens` [n] stand at `positions` [n] of their slots.
        Returns final states [n, hidden]."""
        config = self.config
        count = len(tokens)
        group = config.num_heads // config.num_kv_heads
        end = int(positions.max()) + 1
        write = cache.positions(positions)
        rows = count * config.num_kv_heads
        beyond = self._positions[:end] > positions[:, None]
        mask = torch.zeros(count, end, dtype=self.dtype, device=self.device).masked_fill_(beyond, -torch.inf)
        mask = mask.repeat_interleave(config.num_kv_heads, dim=0)[:, None]
        scale = config.head_dim**-0.5

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            flat_keys, flat_values = cache.flat[layer]
            flat_keys.index_copy_(0, write, keys.reshape(rows, -1))
            flat_values.index_copy_(0, write, values.reshape(rows, -1))
            row_keys, row_values = (row[:rows, :end] for row in cache.rows[layer])
            queries = queries.reshape(rows, group, -1)
            scores = torch.baddbmm(mask, queries, row_keys.transpose(1, 2), alpha=scale)
            return torch.bmm(torch.softmax(scores, dim=-1), row_values).view(count, -1)

        return self._forward(tokens, self._cos[positions], self._sin[positions], attend)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., vocab] in float32 of final states; the head multiplies in float32 too."""
        return F.linear(states.float(), self.weights.head.float())

    def _forward(self, tokens: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = F.embedding(tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            heads = self._norm(x, layer.attention_norm)
            x = x + F.linear(
                self._attention(index, layer, heads, cos, sin, attend), layer.output, layer.output_bias
            )
            gate, up = F.linear(self._norm(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return self._norm(x, self.weights.norm)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        config = self.config
        heads = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        queries_keys = heads[:, : config.num_heads + config.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries_keys = F.rms_norm(queries_keys, (config.head_dim,), None, config.rms_norm_eps)
            queries_keys[:, : config.num_heads].mul_(layer.q_norm)
            queries_keys[:, config.num_heads :].mul_(layer.k_norm)
        queries_keys = rotate(queries_keys, cos, sin)
        values = heads[:, config.num_heads + config.num_kv_heads :]
        return attend(index, queries_keys[:, : config.num_heads], queries_keys[:, config.num_heads :], values)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)
