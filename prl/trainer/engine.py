"""The training engine: a policy, its optimizer and DeepSpeed, with one meaning at every ZeRO stage."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from prl.checkpoint.background import BackgroundSaver
from prl.checkpoint.pretrained import holds_float32, read_pretrained
from prl.checkpoint.save import file_weights
from prl.checkpoint.zero import loading
from prl.config.schema import RlConfig, SftConfig
from prl.model_path import resolve_model_path
from prl.trainer.attention import kernel_choice
from prl.trainer.bf16_step import spare_the_bf16_step
from prl.trainer.distributed import World, import_deepspeed
from prl.trainer.flops import model_cost
from prl.trainer.lora import install_lora
from prl.trainer.model import compute_dtype, load_policy
from prl.trainer.muon import Muon, bind_layouts
from prl.trainer.optimizers import build_optimizer, set_learning_rates
from prl.trainer.published import Published, adapter_weights, buckets, merged_weights
from prl.trainer.routing import RouterWatch
from prl.trainer.schedulers import build_schedule
from prl.trainer.sequence_parallel import check_sequence, join_sequence_group
from prl.trainer.sharded_layers import forget_engine, layer_buckets, shard_by_layers
from prl.trainer.sharded_norm import spare_the_sharded_norm
from prl.trainer.zero import check_zero, deepspeed_config, effective_stage, shard_as_built

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

GATHER_ELEMENTS = 1 << 26
"""Parameters that `full_tensors` gathers at a time under ZeRO 3."""


class StepInfo(NamedTuple):
    """What one optimizer step did: the learning rate it used, the gradient's norm before clipping."""

    lr: float
    grad_norm: float


def _no_veto() -> None:
    """Every update is fine."""


class TrainEngine:
    """Forward, backward and update of the policy over the trainer ranks.

    A step is any number of `forward` and `backward` calls followed by one `step`. All ranks must make the
    same number of them. Gradients of all ranks and rows are summed: a loss divided by a global count gives
    the global mean. Ranks that share rows (`world.sequence`) each pass the whole row and its whole loss.
    """

    def __init__(
        self,
        config: RlConfig | SftConfig,
        world: World,
        total_steps: int | None,
        *,
        model: PreTrainedModel | None = None,
    ) -> None:
        """`model`: a policy made by `make_policy`; None loads the one of `config.model`."""
        check_zero(config.zero, config.optim)
        self.world = world
        self.device = world.device
        self._kernels = kernel_choice(world.device)
        self._schedule_of = (config.scheduler, config.optim.lr, total_steps)
        self.start_schedule(0)
        self._max_norm = config.optim.max_norm
        self.publishes_adapter = config.lora.rank > 0 and config.lora.publish == "adapter"
        dtype = compute_dtype(config.trainer, world.device)
        self.stage = effective_stage(config.zero, dtype)
        self._gathered = import_deepspeed().zero.GatheredParameters
        settings = deepspeed_config(config.zero, config.optim, dtype, on_gpu=world.device.type == "cuda")
        straight = model is None and self.stage == 3
        sharded = partial(shard_as_built, settings, dtype) if straight else None
        self.model = model or load_policy(config.model, config.trainer, world.device, config.seed, sharded)
        self._prepare_model(config)
        self.saver = BackgroundSaver()
        self.routing = RouterWatch(self.model, world.sequence_rank)
        self.cost = model_cost(self.model.config)
        self.optimizer: Optimizer = build_optimizer(config.optim, self.model)
        self._start_deepspeed(settings)
        if model is None and not config.model.random_init and (straight or dtype != torch.float32):
            self._read_weights(resolve_model_path(config.model), always=straight)
        if isinstance(self.optimizer, Muon) and self.stage:
            bind_layouts(self.optimizer, self.deepspeed.optimizer, self.stage)

    def _prepare_model(self, config: RlConfig | SftConfig) -> None:
        """What a model needs before an optimizer sees its parameters."""
        self.model.to(self.device)
        install_lora(self.model, config.lora, config.seed)
        if self.world.sequence > 1:
            check_sequence(self.model.config, self.world.sequence)
            self.model.sequence_group = join_sequence_group(self.world)

    def _start_deepspeed(self, settings: dict[str, Any]) -> None:
        """DeepSpeed around model and optimizer; what runs before an update is told to the optimizer first."""
        import deepspeed

        self._veto: Callable[[], None] = _no_veto
        self.optimizer.register_step_pre_hook(lambda *_: self._veto())
        self._stage_0_norm = math.nan
        if self.stage == 0:
            self.optimizer.register_step_pre_hook(self._clip_at_stage_0)
        if self.stage == 3:
            shard_by_layers(self.model)
            settings["zero_optimization"] |= layer_buckets(self.model)
        self.deepspeed, *_ = deepspeed.initialize(
            model=self.model,
            model_parameters=[p for p in self.model.parameters() if p.requires_grad],
            optimizer=self.optimizer,
            config=settings,
            dist_init_required=False,
        )
        spare_the_bf16_step(self.deepspeed, self.world.size)
        spare_the_sharded_norm(self.deepspeed)

    def _read_weights(self, directory: Path, *, always: bool) -> None:
        """Fill the float32 masters from the files: what went through the compute type has lost precision."""
        if always or holds_float32(directory):
            with loading(self.deepspeed):
                read_pretrained(directory, file_weights(self.deepspeed), self.model.config.to_dict())

    def start_schedule(self, after: int) -> None:
        """Let the learning-rate schedule begin after step `after` and fill what is left of the run."""
        config, lr, total = self._schedule_of
        self.schedule_start = after
        self.schedule = build_schedule(config, lr, None if total is None else total - after)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        temperatures: Tensor,
        sequence_lengths: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """(logprobs, entropy) of one packed row, see `policy_forward`."""
        with self._kernels():
            return self.deepspeed(input_ids, position_ids, temperatures, sequence_lengths)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` (a scalar, this rank's share of the global loss)."""
        with self._kernels():  # recomputation must choose as forward did
            # DeepSpeed averages over ranks; the sum is meant.
            self.deepspeed.backward(loss * self.world.size)

    def step(self, step: int, veto: Callable[[], None] = _no_veto) -> StepInfo:
        """The update of step `step` (from 1). Raises FloatingPointError on a gradient that is not finite.

        `veto` is called when gradients are reduced and before weights change, perhaps several times; what it
        raises ends the step.
        """
        self.saver.check()
        self._veto = veto
        lr = set_learning_rates(self.optimizer, self.schedule(step - self.schedule_start))
        self.deepspeed.step()
        veto()  # DeepSpeed may have seen a gradient that is not finite, and made no update
        norm = self._stage_0_norm if self.stage == 0 else float(self.deepspeed.get_global_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"step {step}: the gradient's norm is {norm}, which spoils the weights; "
                "resume from a checkpoint with a lower optim.lr"
            )
        return StepInfo(lr, norm)

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter and saved buffer, in the compute type.

        Tied weights come once, adapters are merged into their layers. Collective: every rank must exhaust it.
        A tensor is valid until the next step.
        """
        yield from self._gather(merged_weights(self.model))
        saved = self.model.state_dict(keep_vars=True)
        yield from ((name, b.detach()) for name, b in self.model.named_buffers() if name in saved)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(PEFT's name, whole tensor) of every A and B, like `full_tensors`."""
        yield from self._gather(adapter_weights(self.model))

    def _gather(self, published: Iterator[Published]) -> Iterator[tuple[str, Tensor]]:
        for bucket in buckets(published, GATHER_ELEMENTS):
            parameters = [p for entry in bucket for p in entry.parameters]
            with self._gathered(parameters, enabled=self.stage == 3):
                for entry in bucket:
                    yield from entry.tensors().items()

    def close(self) -> None:
        """Wait for a save that is under way; release DeepSpeed's hooks and buffers."""
        self.saver.wait()
        self.deepspeed.destroy()
        if self.stage == 3:
            forget_engine(self.model)
        del self.deepspeed, self.model, self.optimizer
        gc.collect()

    def _clip_at_stage_0(self, optimizer: Optimizer, *_: object) -> None:
        """Runs after DeepSpeed's all-reduce and before the update."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        limit = math.inf if self._max_norm is None else self._max_norm
        self._stage_0_norm = float(torch.nn.utils.clip_grad_norm_(params, limit))
