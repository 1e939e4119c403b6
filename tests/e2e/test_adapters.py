"""Adapters on the native engine and on vLLM, over the protocol: whose keys are read by whom."""

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.backends.vllm.internals import VllmChangedError, check_adapters
from engine.peft import CONFIG, WEIGHTS
from engine.protocol import ErrorReply, Finished
from engine.protocol.reports import AdapterInfo, Description
from tests.adapters import INVOCATION, invocation_of, write_adapter
from tests.conformance.engines import Answer, Engine, Refused, prompt, running_engine
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.serving import eventually


def vllm_lacks() -> str:
    """Why adapters can't be tried on vLLM; empty where they can."""
    python = os.environ.get("VLLM_PYTHON")
    if python is None:
        return "VLLM_PYTHON names no interpreter"
    show = "import importlib.metadata as of; print(of.version('vllm'))"
    version = subprocess.run([python, "-c", show], capture_output=True, text=True).stdout.strip()
    try:
        check_adapters(version, is_cpu="cpu" in version)
    except VllmChangedError as error:
        return str(error)
    return ""


LACKS = vllm_lacks()
needs_vllm = [
    pytest.mark.skipif(bool(LACKS), reason=LACKS),
    pytest.mark.timeout(600),
]
SCOPE = "adapters"
TAIL = " and what follows"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", head_dim=32)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Two adapters on everything, and one that is activated."""
    folder = tmp_path / "adapters"
    for seed, name in enumerate(["blue", "red"], 1):
        write_adapter(model, folder / name, seed)
    write_adapter(model, folder / "judge", 3, alora_invocation_tokens=invocation_of(model))
    return folder


def settings_of(model: Path, folder: Path, **more: Any) -> dict[str, Any]:
    settings = {"MIN_CACHE_TOKENS": 32, "BLOCK_SIZE": 16, "NUM_BLOCKS": 256, "MODEL": str(model)}
    return {**settings, "ADAPTERS": str(folder), **more}


@pytest.fixture
def engine(model: Path, folder: Path) -> Iterator[Engine]:
    with running_engine("native", settings_of(model, folder)) as engine:
        yield engine


@pytest.fixture(params=["native", pytest.param("vllm", marks=needs_vllm)])
def either(request: pytest.FixtureRequest, model: Path, folder: Path) -> Iterator[Engine]:
    """A native engine, and one on vLLM, which takes no activated adapter."""
    settings = settings_of(model, folder)
    if request.param == "vllm":
        settings |= {"BLOCK_SIZE": 32, "VLLM_ARGS": '{"max_model_len": 4096}'}
    with running_engine(request.param, settings) as engine:
        yield engine


def adapters_of(engine: Engine) -> dict[str, AdapterInfo]:
    """By name; of two, one of which leaves, the one that stays."""
    adapters = engine.get("describe", Description).adapters
    return {info.name: info for info in sorted(adapters, key=lambda info: not info.is_leaving)}


def digest_of(engine: Engine, name: str) -> str:
    return adapters_of(engine)[name].digest if name else ""


def ask(
    engine: Engine, texts: tuple[str, ...], name: str = "", digest: str = "", **more: Any
) -> Answer:
    """The first text is marked. `name` is the adapter's, empty for the base model."""
    more = {"max_tokens": 8, "scope": SCOPE, **more}
    request = engine.request(prompt(*texts), more.pop("scope"), (0, "1h"), **more)
    digest = digest or digest_of(engine, name)
    with engine.stream(msgspec.structs.replace(request, adapter=digest)) as stream:
        return Answer(list(stream.frames))


def refusal(engine: Engine, name: str) -> tuple[int, ErrorReply]:
    reply = engine.client.post("/v1/adapters", json={"name": name})
    return reply.status_code, msgspec.json.decode(reply.content, type=ErrorReply)


def read(answer: Answer) -> int:
    return answer.usage.cache_read_tokens


def test_no_adapter_reads_what_another_or_the_base_wrote(either: Engine) -> None:
    """Probes in every order. Answers are those of a cold prompt."""
    names = ["", "blue", "red"]
    text = either.text(200)
    cold = {name: ask(either, (text, TAIL), name) for name in names}
    end = either.ends(prompt(text))[0]
    for name in names:
        assert read(cold[name]) == cold[name].usage.automatic_tokens == 0
        assert cold[name].usage.cache_write_1h_tokens == end
    assert len({answer.text() for answer in cold.values()}) == 3
    for first, second in product(names, names):
        for name in (first, second):
            warm = ask(either, (text, TAIL), name)
            assert read(warm) == end and warm.text() == cold[name].text()
    for writer in names:
        text = either.text(100)
        assert read(ask(either, (text, TAIL), writer)) == 0
        for reader in names:
            probe = ask(either, (text, TAIL), reader, max_tokens=1)
            assert (read(probe) + probe.usage.automatic_tokens > 0) == (reader == writer)


def test_an_activated_adapter_and_the_base_share_one_entry(engine: Engine) -> None:
    text = engine.text(200)
    second_text = engine.text(200)
    end = engine.ends(prompt(text))[0]
    # By the base first, then by the adapter; and the other way round.
    for name, then, words in (("", "judge", text), ("judge", "", second_text)):
        end = engine.ends(prompt(words))[0]
        first = ask(engine, (words, INVOCATION, TAIL), name)
        second = ask(engine, (words, INVOCATION, TAIL), then)
        assert (read(first), read(second)) == (0, end)
        assert first.usage.cache_write_1h_tokens == end
        assert second.usage.cache_write_1h_tokens == 0
        assert first.text() != second.text()
    assert len(engine.entries(SCOPE)) == 2
    # Answers are those of prompts that read nothing.
    for name in ("", "judge"):
        cold = ask(engine, (text, INVOCATION, TAIL), name, scope=f"cold {name}")
        assert read(cold) == 0
        assert cold.text() == ask(engine, (text, INVOCATION, TAIL), name).text()


def test_behind_an_invocation_nothing_is_shared(engine: Engine) -> None:
    texts = (f"{engine.text(100)}{INVOCATION}{engine.text(100)}", TAIL)
    end = engine.ends(prompt(texts[0]))[0]
    base = ask(engine, texts)
    judged = ask(engine, texts, "judge")
    assert read(judged) == 0 and judged.usage.cache_write_1h_tokens == end
    # What lies in front of the invocation is reused without an entry, in whole blocks.
    assert 0 < judged.usage.automatic_tokens < 110
    assert (read(ask(engine, texts)), read(ask(engine, texts, "judge"))) == (end, end)
    assert base.text() != judged.text()
    # Without an invocation it is the base model.
    plain = (engine.text(100), TAIL)
    assert ask(engine, plain).text() == ask(engine, plain, "judge").text()


def test_several_adapters_in_one_step_answer_as_alone(model: Path, folder: Path) -> None:
    names = ["", "blue", "red", "judge"] * 2
    with running_engine("native", settings_of(model, folder)) as engine:
        texts = [(engine.text(60 + 20 * i), INVOCATION, TAIL) for i in range(len(names))]
        alone = [
            ask(engine, text, name, max_tokens=64).text()
            for text, name in zip(texts, names, strict=True)
        ]
    small = settings_of(model, folder, NUM_BLOCKS=84, SPECULATION="ngram")
    with running_engine("native", small) as engine:
        # The pool has no room for all: some are preempted, and computed again.
        streams = []
        together = list[str]()
        for text, name in zip(texts, names, strict=True):
            request = engine.request(prompt(*text), SCOPE, max_tokens=64)
            request = msgspec.structs.replace(request, adapter=digest_of(engine, name))
            streams.append(engine.stream(request))
        opened = [stream.__enter__() for stream in streams]
        together = [turn.rest().text() for turn in opened]
        for stream in streams:
            stream.__exit__(None, None, None)
        assert together == alone
        counters = engine.stats().counters
        assert counters.preempted_requests and counters.accepted_draft_tokens
        three = ask(engine, texts[1], "blue", num_choices=3, max_tokens=64)
        assert [three.text(choice) for choice in range(3)] == [alone[1]] * 3


def test_an_adapter_that_was_trained_again_reads_nothing_of_the_old_one(
    either: Engine, model: Path, folder: Path
) -> None:
    text = either.text(200)
    old = digest_of(either, "blue")
    before = ask(either, (text, TAIL), "blue")
    end = before.usage.cache_write_1h_tokens
    assert read(ask(either, (text, TAIL), "blue")) == end > 0
    write_adapter(model, folder / "blue", 9)
    loaded = either.post("adapters", {"name": "blue"}, AdapterInfo)
    assert loaded.digest != old and loaded == adapters_of(either)["blue"]
    again = ask(either, (text, TAIL), "blue")
    assert read(again) == again.usage.automatic_tokens == 0 and again.text() != before.text()
    with pytest.raises(Refused) as refused:
        ask(either, (text, TAIL), digest=old)
    assert refused.value.status == 404
    # The same weights again are the same adapter.
    same = either.post("adapters", {"name": "blue"}, AdapterInfo)
    assert same == loaded and read(ask(either, (text, TAIL), "blue")) == end


def test_unloading_waits_for_its_requests_and_ends_its_leases(either: Engine) -> None:
    text = either.text(200)
    blue = digest_of(either, "blue")
    words = (text, TAIL)
    short = ask(either, words, "blue", max_tokens=64).text()
    ask(either, words)
    assert [entry.state for entry in either.entries(SCOPE)] == ["leased", "leased"]
    request = either.request(prompt(*words), SCOPE, (0, "1h"), max_tokens=3000)
    with either.stream(msgspec.structs.replace(request, adapter=blue)) as stream:
        stream.start()
        reply = either.client.delete("/v1/adapters/blue")
        assert reply.status_code == 200 and msgspec.json.decode(reply.content)["is_leaving"]
        with pytest.raises(Refused) as refused:
            ask(either, words, digest=blue)
        assert refused.value.status == 404
        assert adapters_of(either)["blue"].is_leaving
        assert len(either.entries(SCOPE)) == 2
        answer = stream.rest()
    (finished,) = [frame for frame in answer.frames if isinstance(frame, Finished)]
    assert finished.output_tokens == 3000 and answer.text().startswith(short)
    eventually(lambda: "blue" not in adapters_of(either))
    # The base's lease stays; the adapter's was ended by the operator, and is counted so.
    assert len(either.entries(SCOPE)) == 1
    assert either.stats().counters.leases_dropped == 1
    assert either.client.delete("/v1/adapters/blue").status_code == 400
    either.post("adapters", {"name": "blue"}, AdapterInfo)
    assert digest_of(either, "blue") == blue
    again = ask(either, words, "blue", max_tokens=64)
    assert (read(again), again.text()) == (0, short)
    assert again.started.miss_reason == "adapter_unloaded"


def test_leases_of_adapters_outlive_a_restart(model: Path, folder: Path, tmp_path: Path) -> None:
    settings = settings_of(model, folder, STORE=str(tmp_path / "store"))
    with running_engine("native", settings) as engine:
        text = engine.text(200)
        cold = {name: ask(engine, (text, TAIL), name) for name in ("blue", "red")}
        end = cold["blue"].usage.cache_write_1h_tokens
    write_adapter(model, folder / "red", 7)  # trained again while the engine was away
    with running_engine("native", settings) as engine:
        warm = ask(engine, (text, TAIL), "blue")
        assert read(warm) == end and warm.started.read_tier == "disk"
        assert warm.text() == cold["blue"].text()
        for name in ("", "red"):
            fresh = ask(engine, (text, TAIL), name)
            assert read(fresh) == 0, name


def test_what_can_not_be_loaded_is_told_alone(either: Engine, model: Path, folder: Path) -> None:
    write_adapter(model, folder / "dora", use_dora=True)
    status, error = refusal(either, "dora")
    assert (status, error.code, error.is_public) == (400, "invalid_request", True)
    assert error.message == "adapter dora: `use_dora`: not supported"
    for name in ("../red", "", "a" * 65, "nobody"):
        status, error = refusal(either, name)
        assert status == 400 and error.is_public
    if either.description.backend == "vllm":
        write_adapter(model, folder / "wide", r=64)
        assert "LoRA rank 64 is greater than max_lora_rank 16" in refusal(either, "wide")[1].message
        assert "vLLM has no activated LoRA" in refusal(either, "judge")[1].message
        assert set(adapters_of(either)) == {"blue", "red"}
    else:
        assert set(adapters_of(either)) == {"blue", "red", "judge"}
    with pytest.raises(Refused) as refused:
        ask(either, ("hello", TAIL), digest="0" * 64)
    assert refused.value.status == 404


@pytest.mark.skipif(bool(LACKS), reason=LACKS)
@pytest.mark.timeout(600)
def test_vllm_computes_what_the_native_engine_does(model: Path, folder: Path) -> None:
    """Alone and several in one step. An adapter has one digest on both."""
    write_adapter(model, folder / "patterns", 5, rank_pattern={"q_proj": 3}, use_rslora=True)
    names = ["", "blue", "red", "patterns"]
    on_vllm = settings_of(model, folder, BLOCK_SIZE=32)
    on_vllm["VLLM_ARGS"] = '{"max_model_len": 4096}'
    with running_engine("native", settings_of(model, folder)) as engine:
        texts = {name: engine.text(80) for name in names}
        expected = {name: ask(engine, (texts[name], TAIL), name, max_tokens=48) for name in names}
        digests = {name: digest_of(engine, name) for name in names}
    assert len({answer.text() for answer in expected.values()}) == len(names)
    with running_engine("vllm", on_vllm) as engine:
        assert {name: digest_of(engine, name) for name in names} == digests
        with ThreadPoolExecutor(len(names)) as pool:
            asking = partial(ask, engine, max_tokens=48)
            together = [pool.submit(asking, (texts[name], TAIL), name) for name in names]
            for name, answer in zip(names, together, strict=True):
                assert answer.result().text() == expected[name].text()
        for name in names:
            warm = ask(engine, (texts[name], TAIL), name, max_tokens=48)
            assert read(warm) > 0 and warm.text() == expected[name].text()


def test_adapters_have_a_bound_in_bytes_together(model: Path, folder: Path) -> None:
    sizes = [(adapter / WEIGHTS).stat().st_size for adapter in folder.iterdir()]
    room = sum(sizes) - 1
    with running_engine("native", settings_of(model, folder, ADAPTER_BYTES=room)) as engine:
        # Those at the start go by their names.
        assert sorted(adapters_of(engine)) == ["blue", "judge"]
        status, error = refusal(engine, "red")
        size = (folder / "red" / WEIGHTS).stat().st_size
        words = f"has {size} bytes, the loaded ones have {sum(sizes) - size}, and"
        assert (status, error.message) == (
            400,
            f"adapter red: {WEIGHTS} {words} ENGINE_ADAPTER_BYTES lets all have {room}",
        )
        engine.client.delete("/v1/adapters/blue")
        eventually(lambda: "blue" not in adapters_of(engine))
        assert engine.post("adapters", {"name": "red"}, AdapterInfo).name == "red"


BACKTRACKING = "(.*|.*|.*)*(.*)*(.*)*(.*)*X"


def write_odd_adapters(model: Path, folder: Path) -> dict[str, str]:
    """Folders whose content could hold up who reads it: why each is refused, by its name."""
    write_adapter(model, folder / "pattern", 4)
    config = json.loads((folder / "pattern" / CONFIG).read_text())
    config["rank_pattern"] = {BACKTRACKING: 2}
    (folder / "pattern" / CONFIG).write_text(json.dumps(config))
    write_adapter(model, folder / "pipe", 5)
    (folder / "pipe" / WEIGHTS).unlink()
    os.mkfifo(folder / "pipe" / WEIGHTS)
    write_adapter(model, folder / "device", 6)
    (folder / "device" / CONFIG).unlink()
    (folder / "device" / CONFIG).symlink_to("/dev/zero")
    return {
        "pattern": "`rank_pattern`: takes more than 2 seconds",
        "pipe": f"{WEIGHTS}: not a regular file",
        "device": f"{CONFIG}: not a regular file",
    }


def test_an_adapter_that_would_hold_up_the_engine_is_refused_while_others_are_answered(
    model: Path, folder: Path
) -> None:
    """The engine answered nobody from then on."""
    odd = write_odd_adapters(model, folder)
    with running_engine("native", settings_of(model, folder)) as engine:
        # At its start it went on without them.
        assert set(adapters_of(engine)) == {"blue", "red", "judge"}
        with ThreadPoolExecutor(1) as pool:
            for name, why in odd.items():
                loading = pool.submit(refusal, engine, name)
                num_answers = 0
                while not loading.done() or not num_answers:
                    assert ask(engine, (engine.text(20), TAIL), "blue", max_tokens=1).usage
                    num_answers += 1
                status, reply = loading.result()
                assert status == 400 and reply.is_public and why in reply.message
        write_adapter(model, folder / "pattern", 4)
        assert engine.post("adapters", {"name": "pattern"}, AdapterInfo).name == "pattern"
