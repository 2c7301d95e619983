"""One member of a broadcast group: `python gpu_sync_rank.py ROLE DIRECTORY GPU`, ROLE trainer or worker.

Prints one JSON line: for each version the fingerprint of what it sent or received.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from prl.config.serving import CollectiveConfig
from prl.sync.collective import Broadcast, CollectivePublisher
from prl.sync.fingerprint import fingerprint
from prl.sync.group import join
from prl.sync.offer import read_offer
from prl.sync.versions import newest_version

SIZES = ((1031, 257), (4096,), (300_001,), (64, 128, 3))
ROUNDS = 3


def weights(version: int, device: torch.device) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(version)
    named = {f"w{i}": torch.randn(size, generator=random) for i, size in enumerate(SIZES)}
    return {name: tensor.to(device, torch.bfloat16) for name, tensor in named.items()}


def trainer(broadcasts: Path, device: torch.device) -> list[dict]:
    publisher = CollectivePublisher(broadcasts, CollectiveConfig(timeout=90.0, bucket_bytes=300_000), device)
    seen = []
    for version in range(ROUNDS):
        named = weights(version, device)
        started = time.perf_counter()
        record = publisher.publish(version, lambda named=named: iter(named.items()))
        torch.cuda.synchronize()
        seen.append({"print": record.fingerprint, "ms": 1e3 * (time.perf_counter() - started)})
    return seen


def worker(broadcasts: Path, device: torch.device) -> list[dict]:
    group, seen = None, []
    for version in range(ROUNDS):
        deadline = time.monotonic() + 90
        while (found := newest_version(broadcasts)) is None or found.version < version:
            assert time.monotonic() < deadline, "no version came"
            time.sleep(0.01)
        directory = Path(found.path)
        offer = read_offer(directory)
        if group is None:
            group = join(offer.host, offer.port, offer.session, 1, 1, 90.0, device)
        source = Broadcast(directory, offer, group)
        received = {name: tensor.to(device, copy=True) for name, tensor in source.tensors()}
        where = {str(tensor.device) for tensor in received.values()}
        seen.append({"print": fingerprint(received.items()), "where": sorted(where)})
    seen[-1]["backend"] = group.backend
    return seen


if __name__ == "__main__":
    role, place, index = sys.argv[1:]
    chosen = torch.device("cuda", int(index))
    torch.cuda.set_device(chosen)
    print(json.dumps({"trainer": trainer, "worker": worker}[role](Path(place), chosen)), flush=True)
