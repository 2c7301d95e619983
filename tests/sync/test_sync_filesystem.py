"""Publishing through files: whole or invisible, sharded, few kept, read back bit by bit."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from prl.config.serving import SyncConfig
from prl.sync import versions
from prl.sync.filesystem import FilesystemPublisher, newest_version, read_version
from prl.sync.fingerprint import fingerprint
from prl.sync.weight_files import WeightFiles


def weights(version: int, count: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"layers.{i}.weight": torch.randn(16, 8, generator=generator) for i in range(count)}


def publisher(path: Path, **overrides) -> FilesystemPublisher:
    return FilesystemPublisher(path / "broadcasts", SyncConfig(**overrides))


def test_a_version_is_read_back_bit_by_bit(tmp_path):
    sent = weights(3) | {"norm.weight": torch.randn(5).to(torch.bfloat16)}
    record = publisher(tmp_path).publish(3, sent.items())
    received = dict(WeightFiles(Path(record.path)).tensors())
    assert received.keys() == sent.keys()
    assert all(torch.equal(received[name], sent[name]) for name in sent)
    assert all(received[name].dtype == sent[name].dtype for name in sent)
    assert record.num_bytes == sum(tensor.nbytes for tensor in sent.values())


def test_the_fingerprint_is_that_of_what_was_published(tmp_path):
    for mode in ("sampled", "full"):
        record = publisher(tmp_path, fingerprint=mode).publish(1, weights(1).items())
        assert record.fingerprint == fingerprint(weights(1).items(), mode)
        read = dict(WeightFiles(Path(record.path)).tensors())
        assert fingerprint(read.items(), mode) == record.fingerprint


def test_nothing_is_there_before_the_first_version(tmp_path):
    assert newest_version(tmp_path / "broadcasts") is None
    publisher(tmp_path)
    assert newest_version(tmp_path / "broadcasts") is None


def test_newest_and_any_version_can_be_read(tmp_path):
    out = publisher(tmp_path, keep=12)
    records = [out.publish(version, weights(version).items()) for version in range(9, 12)]
    assert newest_version(out.broadcasts) == records[-1]  # 11 after 9: by number, not by name
    assert read_version(out.broadcasts, 10) == records[1]
    with pytest.raises(FileNotFoundError):
        read_version(out.broadcasts, 4)


def test_only_the_newest_are_kept(tmp_path):
    out = publisher(tmp_path, keep=2)
    for version in range(5):
        out.publish(version, weights(version).items())
    assert sorted(entry.name for entry in out.broadcasts.iterdir()) == ["step_3", "step_4"]


def test_versions_of_a_rolled_back_attempt_go(tmp_path):
    out = publisher(tmp_path, keep=3)
    for version in (7, 8, 9):
        out.publish(version, weights(version).items())
    resumed = publisher(tmp_path, keep=3)
    resumed.publish(8, weights(80).items())
    assert newest_version(resumed.broadcasts).version == 8
    assert newest_version(resumed.broadcasts).fingerprint == fingerprint(weights(80).items())
    assert read_version(resumed.broadcasts, 7).version == 7


def test_shards_hold_at_most_the_given_bytes(tmp_path):
    size = 16 * 8 * 4
    record = publisher(tmp_path, shard_bytes=2 * size).publish(1, weights(1, count=5).items())
    files = sorted(Path(record.path).glob("*.safetensors"))
    assert [len(load_file(file)) for file in files] == [2, 2, 1]
    index = json.loads((Path(record.path) / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights(1, count=5))
    assert index["metadata"]["total_size"] == record.num_bytes == 5 * size


def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path):
    record = publisher(tmp_path, shard_bytes=1).publish(1, weights(1, count=3).items())
    assert len(list(Path(record.path).glob("*.safetensors"))) == 3


def test_a_reused_buffer_is_copied_in_time(tmp_path):
    buffer = torch.empty(16, 8)

    def stream():
        for name, tensor in weights(1).items():
            yield name, buffer.copy_(tensor)

    record = publisher(tmp_path).publish(1, stream())
    received = dict(WeightFiles(Path(record.path)).tensors())
    assert all(torch.equal(received[name], tensor) for name, tensor in weights(1).items())


def test_views_and_shared_memory_are_published(tmp_path):
    fused = torch.randn(12, 4)
    record = publisher(tmp_path).publish(1, {"q": fused[:8], "k": fused[8:], "t": fused.t()}.items())
    received = dict(WeightFiles(Path(record.path)).tensors())
    assert torch.equal(received["k"], fused[8:])
    assert torch.equal(received["t"], fused.t())


def test_a_version_in_the_making_is_invisible(tmp_path):
    out = publisher(tmp_path)
    out.publish(1, weights(1).items())
    seen = []

    def stream():
        for item in weights(2).items():
            seen.append(newest_version(out.broadcasts).version)
            yield item

    out.publish(2, stream())
    assert seen == [1, 1, 1, 1]
    assert newest_version(out.broadcasts).version == 2


def test_a_failed_publish_leaves_the_old_version_and_can_be_repeated(tmp_path):
    out = publisher(tmp_path)
    out.publish(1, weights(1).items())

    def broken():
        yield "layers.0.weight", torch.ones(2)
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        out.publish(2, broken())
    assert newest_version(out.broadcasts).version == 1
    out.publish(2, weights(2).items())
    assert newest_version(out.broadcasts).fingerprint == fingerprint(weights(2).items())


def test_a_directory_without_its_marker_is_no_version(tmp_path):
    out = publisher(tmp_path)
    record = out.publish(1, weights(1).items())
    (Path(record.path) / "COMPLETE.json").unlink()
    assert newest_version(out.broadcasts) is None


def test_the_marker_is_the_last_file_to_appear(tmp_path, monkeypatch):
    complete_when_marked = []
    real = versions.write_atomic

    def spy(path, text):
        complete_when_marked.append(sorted(entry.name for entry in path.parent.iterdir()))
        real(path, text)

    monkeypatch.setattr(versions, "write_atomic", spy)
    publisher(tmp_path).publish(1, weights(1).items())
    assert complete_when_marked == [["model-00001.safetensors", "model.safetensors.index.json"]]


def test_leftovers_of_a_dead_publisher_are_removed(tmp_path):
    leftover = tmp_path / "broadcasts" / ".step_4.123"
    leftover.mkdir(parents=True)
    (leftover / "model-00001.safetensors").write_bytes(b"torn")
    publisher(tmp_path)
    assert list((tmp_path / "broadcasts").iterdir()) == []


def test_no_weights_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="version 1 holds no weights"):
        publisher(tmp_path).publish(1, [])
    assert newest_version(tmp_path / "broadcasts") is None


def test_readers_never_see_a_torn_version(tmp_path):
    """One thread publishes and deletes while others read everything that is said to be complete."""
    out = publisher(tmp_path, keep=2, shard_bytes=600)
    done = threading.Event()
    faults, seen = [], set()

    def read():
        while not done.is_set():
            newest = newest_version(out.broadcasts)
            if newest is None:
                continue
            try:
                got = fingerprint(WeightFiles(Path(newest.path)).tensors())
            except FileNotFoundError:  # deleted meanwhile: two newer ones are complete
                if newest_version(out.broadcasts).version < newest.version + 2:
                    faults.append(f"{newest.version} vanished too early")
                continue
            seen.add(newest.version)
            if got != newest.fingerprint:
                faults.append(f"{newest.version} is torn")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for version in range(40):
        out.publish(version, weights(version).items())
    done.set()
    for reader in readers:
        reader.join()
    assert faults == []
    assert seen


def test_an_adapter_is_a_directory_that_peft_knows(tmp_path):
    tensors = {"base_model.model.q.lora_A.weight": torch.ones(2, 3)}
    record = publisher(tmp_path).publish(4, tensors.items(), adapter={"r": 2, "lora_alpha": 4})
    directory = Path(record.path)
    assert sorted(entry.name for entry in directory.iterdir()) == [
        "COMPLETE.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert json.loads((directory / "adapter_config.json").read_text()) == {"r": 2, "lora_alpha": 4}
    assert torch.equal(
        load_file(directory / "adapter_model.safetensors")[next(iter(tensors))], torch.ones(2, 3)
    )
    assert dict(WeightFiles(directory).tensors()).keys() == tensors.keys()
    assert record.fingerprint == fingerprint(tensors.items()) and record.num_bytes == 24
