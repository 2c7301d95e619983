"""Broadcasts: what is offered, who meets, and that every worker holds the trainer's bits."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from prl.config.serving import CollectiveConfig, SyncConfig
from prl.run_dir import BIND_VAR
from prl.sync.collective import Broadcast, CollectivePublisher, drain
from prl.sync.fingerprint import fingerprint
from prl.sync.group import BACKEND, WORLD, Meeting, choose_backend, device_identity, join
from prl.sync.offer import ALIGNMENT, Offer, OfferedTensor, bucket_size, read_offer, write_offer
from prl.sync.publishers import make_publisher
from prl.sync.versions import awaited_fingerprint, newest_version, published_mode, read_version

CPU = torch.device("cpu")


def weights(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"embed": (7, 5), "bias": (3,), "deep": (2, 3, 4), "scalar": (), "wide": (40, 11)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in sizes.items()}
    made["half"] = torch.randn(9, generator=generator).to(torch.bfloat16)
    return made


def publisher(tmp_path, **options):
    config = CollectiveConfig(**{"timeout": 30.0, "bucket_bytes": 600, "fingerprint": "full", **options})
    return CollectivePublisher(tmp_path / "broadcasts", config, CPU)


def offered(broadcasts, version):
    """The offer of a version, once it is complete."""
    waiting = threading.Event()
    for _ in range(3000):
        found = newest_version(broadcasts)
        if found is not None and found.version == version:
            return found, read_offer(broadcasts / f"step_{version}")
        waiting.wait(0.01)
    raise AssertionError(f"v{version} was never offered")


def worker(broadcasts, rank, workers, versions, mode="full"):
    """An engine worker: joins at the first offer, then receives each version; name -> tensor of each."""
    group, received = None, []
    for version in versions:
        found, offer = offered(broadcasts, version)
        if group is None:
            group = join(offer.host, offer.port, offer.session, rank, workers, 30.0, CPU)
        source = Broadcast(broadcasts / f"step_{version}", offer, group)
        tensors = {name: tensor.clone() for name, tensor in source.tensors()}
        assert fingerprint(tensors.items(), mode) == awaited_fingerprint(found, 30.0)
        assert {name: spec.shape for name, spec in source.specs().items()} == {
            name: tuple(tensor.shape) for name, tensor in tensors.items()
        }
        received.append(tensors)
    return received


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 600, 10**6])
def test_every_worker_receives_every_version_bit_for_bit(tmp_path, workers, bucket_bytes):
    sender = publisher(tmp_path, bucket_bytes=bucket_bytes)
    versions = [0, 1, 2]
    with ThreadPoolExecutor(workers) as pool:
        ends = [
            pool.submit(worker, sender.broadcasts, rank, workers, versions) for rank in range(1, workers + 1)
        ]
        records = [
            sender.publish(version, lambda v=version: iter(weights(v).items())) for version in versions
        ]
        results = [end.result(60) for end in ends]
    for version, record in zip(versions, records, strict=True):
        assert record.fingerprint == fingerprint(weights(version).items(), "full")
        assert record.num_bytes == sum(tensor.nbytes for tensor in weights(version).values())
        for received in results:
            assert all(torch.equal(received[version][n], t) for n, t in weights(version).items())


def test_a_version_that_nobody_received_yet_is_not_overtaken(tmp_path):
    """Buffers this small are gone before a worker asks for them; the next offer would replace this one."""
    sender = publisher(tmp_path, bucket_bytes=10**6)

    def publish(version):
        return sender.publish(version, lambda: iter(weights(version).items()))

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(publish, 0)
        _, offer = offered(sender.broadcasts, 0)
        joining = pool.submit(join, offer.host, offer.port, offer.session, 2, 2, 30.0, CPU)
        group = join(offer.host, offer.port, offer.session, 1, 2, 30.0, CPU)
        drain(Broadcast(sender.broadcasts / "step_0", offer, group))
        threading.Event().wait(0.3)
        assert not first.done(), "the second worker has not taken part"
        drain(Broadcast(sender.broadcasts / "step_0", offer, joining.result(30)))
        assert first.result(30).version == 0


def test_a_worker_that_never_takes_part_is_waited_for_in_vain(tmp_path):
    sender = publisher(tmp_path, timeout=1.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(sender.publish, 0, lambda: iter(weights(0).items()))
        _, offer = offered(sender.broadcasts, 0)
        group = join(offer.host, offer.port, offer.session, 1, 1, 30.0, CPU)
        with pytest.raises(RuntimeError, match=r"(?i)time"):
            first.result(60)
    assert group.backend == "gloo"


def test_they_meet_where_this_process_is_reached_and_nowhere_else(tmp_path, monkeypatch):
    alone = Meeting("127.0.0.1", 5.0)
    socket.create_connection(("127.0.0.1", alone.port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", alone.port), 5)
    monkeypatch.setenv(BIND_VAR, "127.0.0.2")  # as in a job of several nodes
    sender = publisher(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(worker, sender.broadcasts, 1, 1, [0])
        sender.publish(0, lambda: iter(weights(0).items()))
        end.result(60)
    assert read_offer(sender.broadcasts / "step_0").host == "127.0.0.2"


def test_offers_are_small_files_of_which_the_newest_are_kept(tmp_path):
    sender = publisher(tmp_path, keep=2)
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(worker, sender.broadcasts, 1, 1, range(4))
        for version in range(4):
            sender.publish(version, lambda v=version: iter(weights(v).items()))
        end.result(60)
    assert sorted(entry.name for entry in sender.broadcasts.iterdir()) == ["step_2", "step_3"]
    files = sorted(entry.name for entry in (sender.broadcasts / "step_3").iterdir())
    assert files == ["COMPLETE.json", "collective.json"]
    assert read_version(sender.broadcasts, 3).fingerprint == fingerprint(weights(3).items(), "full")


def test_a_worker_that_cannot_use_an_offer_lets_the_others_go_on(tmp_path):
    sender = publisher(tmp_path)

    def refuse():
        _, offer = offered(sender.broadcasts, 0)
        group = join(offer.host, offer.port, offer.session, 1, 2, 30.0, CPU)
        drain(Broadcast(sender.broadcasts / "step_0", offer, group))
        return True

    with ThreadPoolExecutor(2) as pool:
        refusing = pool.submit(refuse)
        taking = pool.submit(worker, sender.broadcasts, 2, 2, [0])
        sender.publish(0, lambda: iter(weights(0).items()))
        assert refusing.result(60) and taking.result(60)


def test_without_engines_the_trainer_stops_waiting(tmp_path):
    sender = publisher(tmp_path, timeout=0.5)
    with pytest.raises(RuntimeError, match=f"(?i)time.*|{WORLD}"):
        sender.publish(0, lambda: iter(weights(0).items()))


def test_no_weights_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="version 1 holds no weights"):
        publisher(tmp_path).publish(1, lambda: iter(()))


def test_two_passes_that_differ_are_found(tmp_path):
    sender = publisher(tmp_path)
    passes = iter([list(weights(0).items()), list(reversed(weights(0).items()))])

    def take():
        _, offer = offered(sender.broadcasts, 0)
        return join(offer.host, offer.port, offer.session, 1, 1, 30.0, CPU)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(take)
        with pytest.raises(AssertionError, match="differs from the first"):
            sender.publish(0, lambda: iter(next(passes)))


def test_one_pass_a_version_but_the_first_and_the_fingerprint_joins_when_all_is_sent(tmp_path):
    """Under ZeRO 3 each pass gathers the whole model."""
    sender, passes = publisher(tmp_path, fingerprint="sampled"), []

    def tensors(version):
        passes.append(version)
        for number, named in enumerate(weights(version).items()):
            if number == 3 and passes.count(version) == 1 + (version == 0):
                offer = read_version(sender.broadcasts, version)
                assert offer.fingerprint == published_mode(Path(offer.path)) == "sampled"
                with pytest.raises(TimeoutError, match=f"what v{version} holds"):
                    awaited_fingerprint(offer, 0.01)
            yield named

    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(worker, sender.broadcasts, 1, 1, range(3), "sampled")
        records = [sender.publish(version, lambda v=version: tensors(v)) for version in range(3)]
        end.result(60)
    assert passes == [0, 0, 1, 2]
    assert [record.fingerprint for record in records] == [fingerprint(weights(v).items()) for v in range(3)]
    assert read_version(sender.broadcasts, 2) == records[2]


@pytest.mark.parametrize(
    ("trainer", "workers", "backend"),
    [
        ("cuda:a:0", ["cuda:a:1"], "nccl"),
        ("cuda:a:0", ["cuda:b:0", "cuda:b:1"], "nccl"),
        ("cuda:a:0", ["cuda:a:0"], "shared_gpu"),
        ("cuda:a:0", ["cuda:a:0", "cuda:a:0"], "shared_gpu"),
        ("cuda:a:0", ["cuda:a:1", "cuda:a:1"], "gloo"),
        ("cpu", ["cpu"], "gloo"),
        ("cuda:a:0", ["cpu"], "gloo"),
    ],
)
def test_the_way_of_the_bytes_follows_from_the_devices(trainer, workers, backend):
    assert choose_backend(trainer, workers) == backend


def test_a_cpu_is_a_cpu_everywhere():
    assert device_identity(CPU) == "cpu"
    assert BACKEND != WORLD


def make_offer(tensors, bucket_bytes, **changes):
    fields = {"session": "s", "host": "127.0.0.1", "port": 1, "timeout": 2.0, "adapter": None}
    return Offer(**{**fields, **changes}, bucket_bytes=bucket_bytes, tensors=tuple(tensors))


def test_buckets_hold_whole_tensors_in_order_on_aligned_places():
    tensors = [OfferedTensor(str(i), "bfloat16", (n,)) for i, n in enumerate([3, 8, 1, 100, 5])]
    buckets = make_offer(tensors, 64).buckets
    assert [tensor.name for bucket in buckets for tensor, _ in bucket] == ["0", "1", "2", "3", "4"]
    assert [len(bucket) for bucket in buckets] == [3, 1, 1]
    for bucket in buckets:
        ends = [offset + tensor.num_bytes for tensor, offset in bucket]
        starts = [offset for _, offset in bucket]
        assert all(start % ALIGNMENT == 0 for start in starts)
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert bucket_size(bucket) == ends[-1]


def test_an_offer_is_read_as_it_was_written(tmp_path):
    assert read_offer(tmp_path) is None
    offer = make_offer([OfferedTensor("a", "float32", (2, 3))], 7, adapter={"r": 4})
    write_offer(tmp_path, offer)
    assert read_offer(tmp_path) == offer
    assert json.loads((tmp_path / "collective.json").read_text())["session"] == "s"


def test_followers_make_the_passes_that_rank_0_makes(tmp_path):
    for config, passes in ((SyncConfig(), [1, 1, 1, 1]), (CollectiveConfig(), [2, 1, 2, 1])):
        counted = []

        def tensors(counted=counted):
            counted.append("pass")
            yield from weights(0).items()

        follower, seen = make_publisher(tmp_path, config, 1, CPU), []
        for version, adapter in enumerate([None, None, {"r": 4}, {"r": 4}]):
            counted.clear()
            assert follower.publish(version, tensors, adapter) is None
            seen.append(len(counted))
        assert seen == passes


def test_rank_0_publishes_files_or_broadcasts_as_configured(tmp_path):
    files = make_publisher(tmp_path / "a", SyncConfig(), 0, CPU)
    record = files.publish(3, lambda: iter(weights(0).items()))
    assert read_version(tmp_path / "a", 3) == record
    assert isinstance(make_publisher(tmp_path / "b", CollectiveConfig(), 0, CPU), CollectivePublisher)
