"""An engine without a server: `python -m prl.bench.inference_bare KIND MODEL BATCH PROMPT TOKENS THREADS`.

Warms up, says so, and measures one round for each line that it reads: a JSON line with the
seconds to the first tokens and to all, and the CPU seconds of the latter. Runs in a process of its own, under
any interpreter that has the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from prl.bench.inference_shapes import kv_bytes

READY = "ready"
SHARE = 0.3
"""Of a GPU's memory, that vLLM wants to find free; its keys and values are sized by the batch."""


def main(words: list[str]) -> None:
    kind, model, *numbers = words
    batch, prompt, tokens, threads = map(int, numbers)
    make = {"embedded": embedded, "hf": hf_generate, "vllm": vllm}[kind]
    sample = make(Path(model), batch, prompt, tokens, threads)
    sample(2)  # allocations and first-time work
    print(READY, flush=True)
    for _ in sys.stdin:
        print(json.dumps(_round(sample, tokens)), flush=True)


def prompts_of(batch: int, length: int, vocab: int) -> list[list[int]]:
    """Distinct prompts without the special tokens of the first ids."""
    return [[3 + (7 * row + column) % (vocab - 3) for column in range(length)] for row in range(batch)]


def embedded(model: Path, batch: int, prompt: int, tokens: int, threads: int) -> Callable[[int], None]:
    """prl's own sampler, driven directly."""
    import torch

    from prl.inference.dense import DenseDecoder
    from prl.inference.sampler import Sampler
    from prl.inference.sampling_params import SamplingParams

    torch.set_num_threads(threads)
    on_gpu = torch.cuda.is_available()
    decoder = DenseDecoder.from_directory(
        model,
        max_length=prompt + tokens,
        device=torch.device("cuda" if on_gpu else "cpu"),
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        random_init=True,
    )
    engine = Sampler(decoder, max_slots=batch, seed=0)

    def sample(count: int) -> None:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        asked = prompts_of(batch, prompt, decoder.config.vocab_size)
        engine.submit(*(engine.make_request(each, params) for each in asked))
        while engine.busy:
            engine.step()

    return sample


def hf_generate(model: Path, batch: int, prompt: int, tokens: int, threads: int) -> Callable[[int], None]:
    """`generate` of transformers with its default cache, sampling at temperature 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=dtype).to(device).eval()
    )
    ids = torch.tensor(prompts_of(batch, prompt, policy.config.vocab_size), device=device)

    def sample(count: int) -> None:
        settings = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=True, top_k=0, pad_token_id=0
        )
        with torch.inference_mode():
            policy.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)

    return sample


def vllm(model: Path, batch: int, prompt: int, tokens: int, threads: int) -> Callable[[int], None]:
    """`vllm.LLM` in the environment of its server, with the logprob of every sampled token."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking CUDA would forbid vLLM to fork
    import torch

    from prl.inference.vllm_server import CPU_ENVIRONMENT, ENVIRONMENT

    for variables in (ENVIRONMENT, {} if torch.cuda.is_available() else CPU_ENVIRONMENT):
        for key, value in variables.items():
            os.environ.setdefault(key, value)  # vLLM reads them when it is imported
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    on_gpu = not current_platform.is_cpu()
    options: dict[str, Any] = {"enforce_eager": True}
    if on_gpu:
        size = kv_bytes(model, batch, prompt + tokens, 2)
        options = {"gpu_memory_utilization": SHARE, "kv_cache_memory_bytes": size}
    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=prompt + tokens,
        dtype="bfloat16" if on_gpu else "float32",
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        **options,
    )
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    asked = [{"prompt_token_ids": each} for each in prompts_of(batch, prompt, vocab)]

    def sample(count: int) -> None:
        params = SamplingParams(
            max_tokens=count, ignore_eos=True, temperature=1.0, detokenize=False, logprobs=0
        )
        llm.generate(asked, params, use_tqdm=False)

    return sample


def _round(sample: Callable[[int], None], tokens: int) -> dict[str, float]:
    started = time.perf_counter()
    sample(1)
    first = time.perf_counter() - started
    busy, started = _own_cpu_seconds(), time.perf_counter()
    sample(tokens)
    whole = time.perf_counter() - started
    return {"first": first, "whole": whole, "cpu": _own_cpu_seconds() - busy}


def _own_cpu_seconds() -> float:
    """Of this process and those that it started: vLLM's engine runs in one of its own."""
    return time.process_time() + cpu_seconds(psutil.Process().children(recursive=True))


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """CPU time that these processes have taken, of those that are still there."""
    times = [process.cpu_times() for process in processes if process.is_running()]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main(sys.argv[1:])
