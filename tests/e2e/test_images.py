"""Images on an engine that sees, as the official SDKs and coding agents send them: real sockets, a
tiny vision model on vLLM's CPU build: in our process, and in a server before which we stand. With
VLLM_MOUNTED=1 that engine is our plugin's. Models of other families are where VLLM_PYTHON has
torchvision."""

import os
import struct
import subprocess
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx
import pytest
from anthropic import Anthropic, BadRequestError
from google import genai
from google.genai import types
from openai import OpenAI

from tests.conformance.engines import running_engine
from tests.e2e.prompts import handbook, png
from tests.engine.backends.vllm.models import SEEING_MODELS, write_idefics
from tests.fuzz.houses import serving
from tests.fuzz.servers import Machines

pytestmark = [
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter"),
    pytest.mark.timeout(900),
]
MODEL = "tiny-eyes"
BLOCK_SIZE = 32
MODELS_TOML = """default = "tiny-eyes"

[[models]]
id = "tiny-eyes"
engine_model = "{served}"
min_cache_tokens = 32
"""
# The first two see by Idefics 3.
ENGINES = ("vllm",) if os.environ.get("VLLM_MOUNTED") else ("vllm", "upstream", *SEEING_MODELS)
MARK = {"type": "ephemeral"}


def large(**more: int) -> bytes:
    """An image that has more tokens than a block of every model's."""
    return png(224, 168, **more)


def block(data: bytes, *, marked: bool = False) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}
    return {"type": "image", "source": source, **({"cache_control": MARK} if marked else {})}


def text(words: str, *, marked: bool = False) -> dict[str, Any]:
    return {"type": "text", "text": words, **({"cache_control": MARK} if marked else {})}


class House(NamedTuple):
    url: str
    keys: Sequence[str]
    engine: str

    def client(self, workspace: int = 0) -> Anthropic:
        key = self.keys[workspace]
        return Anthropic(api_key=key, base_url=self.url, max_retries=0, timeout=120)


@pytest.fixture(scope="module", params=ENGINES)
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    backend = request.param
    write = write_idefics
    if backend in SEEING_MODELS:
        program = (
            "from importlib.util import find_spec as f; import sys; sys.exit(not f('torchvision'))"
        )
        if subprocess.run([os.environ["VLLM_PYTHON"], "-c", program]).returncode:
            pytest.skip("VLLM_PYTHON has no torchvision")
        write = SEEING_MODELS[backend]
        backend = "vllm"
    model = tmp_path_factory.mktemp("model") / "eyes"
    model.mkdir()
    settings = {
        "MODEL": str(write(model)),
        "NUM_BLOCKS": 1024,
        "BLOCK_SIZE": BLOCK_SIZE,
        "VLLM_ARGS": '{"max_model_len": 4096, "limit_mm_per_prompt": {"image": 6}}',
    }
    with running_engine(backend, settings) as engine:
        assert "images" in engine.description.capabilities
        directory = tmp_path_factory.mktemp("gateway")
        models = MODELS_TOML.format(served=engine.description.model)
        with serving(directory, Machines([engine]), models, ["one", "two"]) as (url, keys):
            yield House(url, keys, request.param)


def ask(client: Anthropic, content: Any, *more: dict[str, Any]) -> Any:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}, *more],
    }
    counted = client.messages.count_tokens(**body).input_tokens
    usage = client.messages.create(**body, max_tokens=4).usage
    read_tokens = usage.cache_read_input_tokens or 0
    written_tokens = usage.cache_creation_input_tokens or 0
    assert usage.input_tokens + read_tokens + written_tokens == counted
    return usage


def test_an_image_is_read_in_the_second_turn_and_by_nobody_else(house: House) -> None:
    about = handbook(1)
    content = [text(about), block(large(), marked=True)]
    with house.client() as first_client, house.client(1) as second_client:
        alone = ask(first_client, [text(about, marked=True)])
        first = ask(first_client, content)
        num_written = first.cache_creation_input_tokens
        # More than the text: the image has tokens of its own, and they are in the entry.
        assert alone.cache_creation_input_tokens + 32 <= num_written + first.cache_read_input_tokens
        num_tokens = num_written + first.cache_read_input_tokens
        again = ask(first_client, [*content, text("And now?")])
        assert (again.cache_read_input_tokens, again.cache_creation_input_tokens) == (num_tokens, 0)
        # One pixel is another image: of it the text in front is read.
        changed = ask(first_client, [text(about), block(large(first=1), marked=True)])
        assert changed.cache_read_input_tokens <= alone.cache_creation_input_tokens
        assert changed.cache_read_input_tokens + changed.cache_creation_input_tokens == num_tokens
        # So is the same image in another workspace, where nothing at all is read.
        foreign = ask(second_client, content)
        assert (foreign.cache_read_input_tokens, foreign.cache_creation_input_tokens) == (
            0,
            num_tokens,
        )


def test_a_screenshot_in_a_tool_result_is_read_in_the_next_turn(house: House) -> None:
    """As Claude Code sends what its `Read` found in a picture."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "a.png"}}
    tools = [{"name": "Read", "description": "Reads", "input_schema": {"type": "object"}}]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [text(handbook(1))]},
        {"role": "assistant", "content": [call]},
    ]

    content = [text("Before."), block(large(shade=20)), text("Behind.")]

    def turn(client: Anthropic, shade: int, *more: dict[str, Any]) -> Any:
        content[1] = block(large(shade=shade))
        result = {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": content,
            "cache_control": MARK,
        }
        messages = [*turns, {"role": "user", "content": [result]}, *more]
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": tools}
        return client.messages.create(**body, max_tokens=4).usage

    with house.client() as client:
        if house.engine == "gemma3":
            # vLLM's own processor does not find an image that one line break follows.
            with pytest.raises(BadRequestError, match=r"messages\.2\.content\.0.*Could not"):
                turn(client, 20)
            del content[2]
        written_tokens = turn(client, 20).cache_creation_input_tokens
        message = {"role": "assistant", "content": "A picture."}
        grown = turn(client, 20, message, {"role": "user", "content": "Of what?"})
        assert grown.cache_read_input_tokens == written_tokens > 100
        assert turn(client, 21).cache_read_input_tokens == 0


def test_images_are_read_wherever_they_stand(house: House) -> None:
    """First of all, one behind the other, and beside line breaks."""
    about = handbook(1)
    first_image = block(large(shade=1))
    second_image = block(large(shade=2))
    with house.client() as client:
        for parts in (
            [first_image, text(f"\n{about}")],
            [text(f"{about}\n"), first_image, second_image, text("\n\nAnd?")],
            [text(about), second_image, text("\nor"), first_image, second_image],
        ):
            content: list[dict[str, Any]] = [*parts[:-1], {**parts[-1], "cache_control": MARK}]
            first = ask(client, content)
            num_held = first.cache_creation_input_tokens + first.cache_read_input_tokens
            again = ask(client, [*content, text("Well?")])
            assert (again.cache_read_input_tokens, again.cache_creation_input_tokens) == (
                num_held,
                0,
            )


def test_every_dialect_shows_the_same_image_and_reads_the_others_entry(house: House) -> None:
    about = handbook(1)
    data = png(60, 60, shade=44)
    url = f"data:image/png;base64,{b64encode(data).decode()}"
    with house.client() as client:
        usage = ask(client, [text(about), block(data, marked=True)])
    num_held = usage.cache_creation_input_tokens
    tokens = num_held + usage.input_tokens
    openai = OpenAI(api_key=house.keys[0], base_url=f"{house.url}/v1", max_retries=0)
    parts: Any = [{"type": "text", "text": about}, {"type": "image_url", "image_url": {"url": url}}]
    chat = openai.chat.completions.create(
        model=MODEL, max_tokens=4, messages=[{"role": "user", "content": parts}]
    ).usage
    assert chat is not None and chat.prompt_tokens_details is not None
    assert (chat.prompt_tokens, chat.prompt_tokens_details.cached_tokens) == (tokens, num_held)
    items: Any = [
        {"type": "input_text", "text": about},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    response = openai.responses.create(
        model=MODEL, max_output_tokens=16, input=[{"role": "user", "content": items}]
    ).usage
    assert response is not None
    read_tokens = response.input_tokens_details.cached_tokens
    assert (response.input_tokens, read_tokens) == (tokens, num_held)
    google = genai.Client(api_key=house.keys[0], http_options={"base_url": house.url})
    answer = google.models.generate_content(
        model=MODEL,
        contents=[about, types.Part.from_bytes(data=data, mime_type="image/png")],
        config={"max_output_tokens": 4},
    ).usage_metadata
    assert answer is not None
    assert (answer.prompt_token_count, answer.cached_content_token_count) == (tokens, num_held)


def test_a_bad_image_is_a_400_of_the_dialect_that_names_the_block(house: House) -> None:
    torn = png(shade=7)[:-30]
    bomb = png()[:16] + struct.pack(">II", 30_000, 30_000) + png()[24:]
    lying = png()[:16] + struct.pack(">II", 200, 200) + png()[24:]
    large = png() + bytes(10 * 2**20)
    bad = {
        "Could not process image": (torn, lying),
        "30000 × 30000 pixels, of 16777216 at most": (bomb,),
        "at most 10485760 bytes an image": (large,),
        "must be a PNG, JPEG, GIF or WebP file": (b"<svg></svg>",),
    }
    with house.client() as client, httpx.Client(base_url=house.url, timeout=120) as plain:
        for words, files in bad.items():
            for data in files:
                content = [text("See."), block(png()), block(data)]
                for call in (client.messages.count_tokens, client.messages.create):
                    options = {} if call == client.messages.count_tokens else {"max_tokens": 4}
                    messages: Any = [{"role": "user", "content": content}]
                    with pytest.raises(BadRequestError) as raised:
                        call(model=MODEL, messages=messages, **options)
                    error = raised.value.body["error"]  # type: ignore[index]
                    assert error["type"] == "invalid_request_error"
                    assert error["message"].startswith("messages.0.content.2")
                    assert words in error["message"] and "[image" not in error["message"]
        url = f"data:image/png;base64,{b64encode(torn).decode()}"
        part = {"inlineData": {"mimeType": "image/png", "data": b64encode(torn).decode()}}
        chat_image = {"type": "image_url", "image_url": {"url": url}}
        responses_image = {"type": "input_image", "image_url": url}
        for path, where, body in (
            (
                "/v1/chat/completions",
                "messages[0].content[0]",
                {"messages": [{"role": "user", "content": [chat_image]}]},
            ),
            (
                "/v1/responses",
                "input[0].content[0]",
                {"input": [{"role": "user", "content": [responses_image]}]},
            ),
            (
                f"/v1beta/models/{MODEL}:generateContent",
                "contents[0].parts[0].inlineData",
                {"contents": [{"parts": [part]}]},
            ),
        ):
            headers = {"authorization": f"Bearer {house.keys[0]}"}
            named = {} if "Content" in path else {"model": MODEL}
            answer = plain.post(path, json={**named, **body}, headers=headers)
            message = answer.json()["error"]["message"]
            assert (answer.status_code, message) == (400, f"{where}: Could not process image")
        source = {"type": "url", "url": "http://127.0.0.1/a.png"}
        with pytest.raises(BadRequestError, match="fetches no addresses"):
            ask(client, [{"type": "image", "source": source}])
        with pytest.raises(BadRequestError, match=r"messages\.0\.content\.6.*Could not"):
            ask(client, [block(png(shade=shade)) for shade in range(7)])
