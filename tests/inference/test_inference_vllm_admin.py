"""prl's routes before vLLM's application, with an application and an engine client that only remember."""

import asyncio
import json
from types import SimpleNamespace

import pytest
import torch

from prl.config.serving import SyncConfig
from prl.inference import vllm_admin
from prl.inference.vllm_admin import AdminMiddleware, Settings, salt_body
from prl.sync.filesystem import FilesystemPublisher
from prl.sync.offer import Offer, OfferedTensor, write_offer


class Client:
    """The part of vLLM's engine client that is used."""

    def __init__(self, directory, prints=("full:a",)):
        self.calls, self.paused = [], False
        self.proofs = [{"fingerprint": each, "different": [], "unproven": []} for each in prints]
        self.model_config = SimpleNamespace(model=str(directory))
        parallel = SimpleNamespace(world_size_across_dp=2)
        self.vllm_config = SimpleNamespace(parallel_config=parallel)
        self.fault = None

    async def collective_rpc(self, method, args=()):
        self.calls.append((method, args))
        if self.fault:
            raise self.fault
        return self.proofs

    async def is_paused(self):
        return self.paused

    async def pause_generation(self, *, mode, clear_cache):
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True
        self.calls.append("pause")

    async def resume_generation(self):
        self.paused = False
        self.calls.append("resume")

    async def reset_prefix_cache(self):
        self.calls.append("reset")
        return True

    async def update_weight_version(self, version):
        self.calls.append(("version", version))


class Served:
    """The middleware around an application that answers with the body it was given."""

    def __init__(self, client):
        self.client = client
        state = SimpleNamespace(engine_client=client, openai_serving_models=SimpleNamespace(lora_requests={}))
        self.app = SimpleNamespace(state=state)
        self.stack = AdminMiddleware(self.inner)

    async def inner(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await send({"type": "lifespan.startup.complete"})
            return
        message = await receive()
        self.following = await receive()
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": message.get("body", b"")})

    def ask(self, method, path, body=b"{}", pieces=1):
        """(status, body) of one request whose body comes in `pieces`."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(body) // pieces) or 1
        parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        inbox = [
            {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
            for i, part in enumerate(parts)
        ]
        sent = []

        async def receive():
            return inbox.pop(0) if inbox else {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "app": self.app}
        asyncio.run(self.stack(scope, receive, send))
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    made = Settings(model="policy", fingerprint_mode="full")
    monkeypatch.setattr(vllm_admin, "SETTINGS", made)
    return made


@pytest.fixture
def publisher(tmp_path):
    return FilesystemPublisher(tmp_path / "broadcasts", SyncConfig(fingerprint="full"))


def version(publisher, number, **tensors):
    tensors = tensors or {"w": torch.ones(3, 2)}
    return publisher.publish(number, tensors.items()).path


@pytest.fixture
def base(tmp_path):
    """The model's own files."""
    publisher = FilesystemPublisher(tmp_path / "model", SyncConfig())
    return publisher.publish(0, {"w": torch.zeros(3, 2), "lm_head.weight": torch.zeros(2)}.items()).path


def test_an_update_pauses_loads_resets_and_resumes(base, publisher, settings):
    served = Served(Client(base))
    path = version(publisher, 7)
    status, answer = served.ask("POST", "/update_weights", {"weight_dir": path, "version": 7})
    answer = json.loads(answer)
    assert status == 200 and answer["seconds"] >= 0
    assert (answer["version"], answer["fingerprint"]) == (7, "full:a")
    load = ("prl_load", (path, "full"))
    assert served.client.calls == ["pause", load, "reset", ("version", "7"), "resume"]
    assert settings.updates == 1


def test_the_engine_is_frozen_without_vllms_wait_for_output(base):
    client = Client(base)

    async def pause_scheduler(*, mode, clear_cache):
        client.calls.append(("frozen", mode, clear_cache))

    client.engine_core = SimpleNamespace(pause_scheduler_async=pause_scheduler)
    assert Served(client).ask("POST", "/pause")[0] == 200
    assert client.calls == [("frozen", "keep", False)]


def test_an_engine_that_is_paused_already_stays_paused(base, publisher):
    served = Served(Client(base))
    served.ask("POST", "/pause?ignored")
    assert served.ask("POST", "/pause")[0] == 200
    served.ask("POST", "/update_weights", {"weight_dir": version(publisher, 1), "version": 1})
    assert served.client.paused
    assert served.ask("POST", "/resume") == (200, b'{"status": "resumed"}')
    assert not served.client.paused


def test_a_failed_load_resumes_and_is_told(base, publisher, settings):
    served = Served(Client(base))
    served.client.fault = RuntimeError("out of memory")
    status, answer = served.ask(
        "POST", "/update_weights", {"weight_dir": version(publisher, 1), "version": 1}
    )
    assert status == 500 and b"out of memory" in answer
    assert not served.client.paused and settings.updates == 1


def test_workers_that_differ_answer_a_fingerprint_that_nobody_published(base, publisher, caplog):
    """Not an error, which would be tried again: the run stops at the answer."""
    served = Served(Client(base, prints=("full:a", "full:b")))
    served.client.proofs[1]["different"] = ["w"]
    body = {"weight_dir": version(publisher, 1), "version": 1}
    status, answer = served.ask("POST", "/update_weights", body)
    assert status == 200 and json.loads(answer)["fingerprint"] == "full:a and full:b"
    assert "other values than were received: w" in caplog.text


def test_what_no_worker_can_read_back_is_counted_and_told_once(base, publisher, caplog):
    served = Served(Client(base, prints=("full:a", "full:a")))
    served.client.proofs[0]["unproven"] = ["v", "w"]
    served.client.proofs[1]["unproven"] = ["u", "w"]  # of another pipeline stage
    for number in (1, 2):
        body = {"weight_dir": version(publisher, number), "version": number}
        status, answer = served.ask("POST", "/update_weights", body)
        assert status == 200 and json.loads(answer)["unproven"] == 1
    told = [record.getMessage() for record in caplog.records if "only their receipt" in record.getMessage()]
    assert told == ["1 tensors lie where they cannot be read back, so only their receipt is proven: w"]


def test_a_model_of_random_weights_takes_its_first_version_as_it_is(tmp_path, publisher):
    """Its directory has no weights to compare with; later versions must be like the first."""
    served = Served(Client(tmp_path))
    body = {"weight_dir": version(publisher, 1), "version": 1}
    assert served.ask("POST", "/update_weights", body)[0] == 200
    wider = version(publisher, 2, w=torch.ones(3, 4))
    status, answer = served.ask("POST", "/update_weights", {"weight_dir": wider, "version": 2})
    assert status == 400 and b"do not fit: w" in answer


def test_what_does_not_fit_never_reaches_a_worker(base, publisher, tmp_path):
    served = Served(Client(base))
    wrong = version(publisher, 1, w=torch.ones(4, 2))
    unknown = version(publisher, 2, v=torch.ones(3, 2))
    for body, status in (
        ({"weight_dir": wrong, "version": 1}, 400),
        ({"weight_dir": unknown, "version": 1}, 400),
        ({"weight_dir": str(tmp_path / "nothing"), "version": 1}, 503),
        ({"weight_dir": wrong}, 400),
        ({"weight_dir": None, "version": 1}, 400),
        ({"weight_dir": wrong, "version": True}, 400),
        ([], 400),
        (b"{not json", 400),
    ):
        assert served.ask("POST", "/update_weights", body)[0] == status, body
    assert all(call in ("pause", "resume") for call in served.client.calls)


def test_later_versions_hold_what_the_first_one_held(base, publisher):
    served = Served(Client(base))
    whole = version(publisher, 1, **{"w": torch.ones(3, 2), "lm_head.weight": torch.ones(2)})
    partial = version(publisher, 2)
    assert served.ask("POST", "/update_weights", {"weight_dir": whole, "version": 1})[0] == 200
    status, answer = served.ask("POST", "/update_weights", {"weight_dir": partial, "version": 2})
    assert status == 400 and b"lm_head.weight" in answer


def test_a_broadcast_is_received_by_the_workers(base, tmp_path):
    served = Served(Client(base))
    offer = Offer("s", "127.0.0.1", 5, 2.0, 100, (OfferedTensor("w", "float32", (3, 2)),), None)
    write_offer(tmp_path / "step_1", offer)
    join = {"host": "127.0.0.1", "port": 5, "session_id": "s", "rank_offset": 1, "inference_world_size": 2}
    assert served.ask("POST", "/init_broadcaster", {**join, "timeout": 2})[0] == 200
    body = {"weight_dir": str(tmp_path / "step_1"), "version": 1}
    assert served.ask("POST", "/update_weights", body)[0] == 200
    assert served.client.calls[0] == ("prl_join", ("127.0.0.1", 5, "s", 1, 2, 2.0))
    assert ("prl_load", (str(tmp_path / "step_1"), "full")) in served.client.calls


def test_a_bad_call_to_join_is_refused(base):
    served = Served(Client(base))
    good = {
        "host": "h",
        "port": 5,
        "session_id": "s",
        "rank_offset": 1,
        "inference_world_size": 2,
        "timeout": 1.5,
    }
    for change in ({"port": "5"}, {"rank_offset": 3}, {"rank_offset": 0}, {"host": None}, {"timeout": True}):
        status, answer = served.ask("POST", "/init_broadcaster", {**good, **change})
        assert status == 400 and next(iter(change)).encode() in answer
    assert served.client.calls == []


def test_a_frozen_engine_takes_nothing(base, publisher, settings):
    settings.frozen = True
    served = Served(Client(base))
    for path in ("/update_weights", "/load_lora_adapter", "/init_broadcaster"):
        status, answer = served.ask("POST", path, {"weight_dir": version(publisher, 1), "version": 1})
        assert status == 400 and b"frozen model policy" in answer
    assert served.client.calls == []


def test_liveness_world_size_and_wrong_methods(base):
    served = Served(Client(base))
    assert json.loads(served.ask("GET", "/world_size")[1]) == {"world_size": 2}
    assert json.loads(served.ask("GET", "/liveness")[1]) == {"status": "ok", "workers": 1}
    assert served.ask("GET", "/update_weights")[0] == 405
    assert served.ask("GET", "/metrics")[0] == 299


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("pieces", [1, 7])
def test_sampling_requests_get_the_salt_of_the_current_weights(base, settings, path, pieces):
    served = Served(Client(base))
    settings.updates = 5
    body = {"token_ids": [1, 2], "cache_salt": "v3", "nested": {"cache_salt": "kept"}}
    status, seen = served.ask("POST", path, body, pieces)
    assert status == 299
    assert json.loads(seen) == {**body, "cache_salt": "prl-5"}
    assert served.following == {"type": "http.disconnect"}


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b" { } ", b"{broken", b"null"])
def test_what_is_no_filled_object_is_passed_on_as_it_is(body):
    assert salt_body(body, "s") == body


def test_a_salt_ends_in_the_object():
    assert json.loads(salt_body(b'{"a": "}"} \n', 'q"')) == {"a": "}", "cache_salt": 'q"'}


def test_the_address_is_told_once_requests_are_answered(base, settings):
    told = []
    settings.listening = lambda: told.append("now")
    served = Served(Client(base))

    async def start():
        async def send(message):
            assert told == []

        await served.stack({"type": "lifespan"}, None, send)

    asyncio.run(start())
    assert told == ["now"]
