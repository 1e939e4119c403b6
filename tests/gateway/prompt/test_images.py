"""Images for a model that sees: what is taken, and what becomes of their bytes on the way."""

import time
from base64 import b64encode
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from google.genai import types

from engine import protocol
from engine.protocol import IMAGE_REFERENCE, MAX_IMAGES, Prompt, TextPart, ToolResultPart
from gateway.base.errors import InvalidRequest
from gateway.prompt.images import MAX_IMAGE_BYTES, ImageReader
from gateway.prompt.media import Media
from gateway.prompt.names import find_prefixes
from gateway.prompt.plan import make_plan
from gateway.prompt.slots import Slot
from tests.gateway.bodies import told
from tests.gateway.conftest import stacked
from tests.gateway.gemini_bodies import client
from tests.gateway.openai_bodies import MODEL, chat
from tests.gateway.prompt.test_media import IMAGES, png
from tests.gateway.scripted_engine import ScriptedEngine

ONE_SIZE = "the model has one size for an image"


def media(data: bytes) -> Media:
    return Media("image", "image/png", b64encode(data).decode())


@pytest.mark.parametrize("data, size", IMAGES)
def test_an_image_is_known_by_its_bytes_and_its_scope(data: bytes, size: tuple[int, int]) -> None:
    reader = ImageReader("scope")
    reference = reader.read("a", media(data))
    assert reader.read("b", media(data)) == reference
    [image] = reader.images.values()
    assert (image.data, (image.width, image.height)) == (data, size)
    assert reader.paths == {image.id: "a"}
    assert reader.read("c", media(data + b"\0")) != reference
    assert ImageReader("another").read("a", media(data)) != reference
    assert IMAGE_REFERENCE.fullmatch(reference)


@pytest.mark.parametrize("filling", [b"\xff" * 2**23, b"\xff\xe0\0\2" * 2**21])
def test_a_jpeg_of_padding_alone_costs_nothing(filling: bytes) -> None:
    """Each of these took ten seconds and more."""
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="must be a PNG, JPEG"):
        ImageReader("s").read("a", media(b"\xff\xd8" + filling))
    assert time.process_time() - began < 1


def test_what_is_too_large_is_refused_before_it_is_decoded() -> None:
    for data, words in (
        (png(10, 10) + bytes(MAX_IMAGE_BYTES), "at most 10485760 bytes an image"),
        (png(50_000, 50_000), "50000 × 50000 pixels, of 16777216 at most"),
        (png(0, 5), "0 × 5 pixels"),
        (b"%PDF-1.7", "must be a PNG, JPEG, GIF or WebP file"),
    ):
        with pytest.raises(InvalidRequest, match=words) as raised:
            ImageReader("s").read("messages.0.content.3", media(data))
        assert str(raised.value).startswith("messages.0.content.3: ")
        assert str(raised.value).endswith("Could not process image")
    for source, words in (
        (Media("image", "image/png", "a?"), r"a: must be base64\. "),
        (Media("image", name="http://10.0.0.1/x"), "base64: this server fetches no addresses"),
        (Media("image", name="file_1"), "a: must be base64, in a URL as `data:`"),
        (Media("image", "image/png"), "a: must be base64, in a URL as `data:`"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            ImageReader("s").read("a", source)
    for size, most in ((1, MAX_IMAGES), (4096, 6)):
        reader = ImageReader("s")
        for number in range(most):
            reader.read("a", media(png(size, size) + bytes(number)))
        with pytest.raises(InvalidRequest, match="at most 100"):
            reader.read("a", media(png(size, size)))


def test_blocks_and_results_show_images_where_the_engine_sees(tmp_path: Path) -> None:
    url = b64encode(png(640, 480)).decode()
    image_block = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": url},
    }
    call = {"type": "tool_use", "id": "toolu_1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Look"}, image_block]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{**result, "content": [image_block]}]},
    ]
    messages[0]["content"][1] = {**image_block, "cache_control": {"type": "ephemeral"}}
    engine = ScriptedEngine(capabilities=get_args(protocol.Capability))
    with stacked(tmp_path, engine) as stack:
        first = stack.sdk().messages.create(model=MODEL, max_tokens=5, messages=messages)
        assert told(first) == []
        prompt = engine.requests[-1].prompt
        points = engine.requests[-1].breakpoints
        # Google's client writes base64 for URLs.
        data = png(640, 480) + b"\xfb\xff\xfe" * 3
        with client(stack) as google:
            part = types.Part.from_bytes(data=data, mime_type="image/png")
            google.models.generate_content(model=MODEL, contents=[part])
        assert engine.requests[-1].prompt.images[0].data == data
        # How much of it is wanted is the model's business, and told.
        for detail, ignored in (("auto", []), ("low", [(".detail", ONE_SIZE)])):
            address = f"DATA:image/png;base64,{url}"
            responses_image: Any = {
                "type": "image_url",
                "image_url": {"url": address, "detail": detail},
            }
            chatted = chat(stack, messages=[{"role": "user", "content": [responses_image]}])
            assert told(chatted) == [(f"messages[0].content[0]{at}", why) for at, why in ignored]
            responses_image = {"type": "input_image", "image_url": address, "detail": detail}
            answer = stack.openai().responses.create(
                model=MODEL, input=[{"role": "user", "content": [responses_image]}]
            )
            assert told(answer) == [(f"input[0].content[0]{at}", why) for at, why in ignored]
            assert engine.requests[-1].prompt.images[0].data == png(640, 480)
    [image] = prompt.images
    assert image.data == png(640, 480)
    texts = [p.text for m in prompt.messages for p in m.parts if isinstance(p, TextPart)]
    results = [p.text for m in prompt.messages for p in m.parts if isinstance(p, ToolResultPart)]
    assert (texts, results) == (["Look", image.reference], [image.reference])
    assert [point.segment for point in points] == [1]
    # An image is part of each name behind it, and of a prompt's estimated size.
    sizes = [prefix.num_bytes for prefix in find_prefixes(prompt, "s")]
    assert sizes[1] - sizes[0] > 4 * 640 * 480 // 784


def test_an_engines_refusal_of_an_image_names_its_block() -> None:
    plan = make_plan(Prompt([], text="x"), [Slot(path="prompt")], None, "s")
    plan = msgspec.structs.replace(plan, image_paths={"ab" * 32: "messages.2.content.0"})
    assert plan.in_request(f"[image {'ab' * 32}]: no") == "messages.2.content.0: no"
    assert plan.in_request(f"[image {'cd' * 32}]: no") == "messages: no"
