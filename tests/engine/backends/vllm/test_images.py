"""What is kept of a prompt's images while vLLM answers."""

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.external import Order
from engine.backends.vllm.core import VllmCore
from engine.backends.vllm.directive import Directive
from engine.protocol import GenerateRequest, Image, Message, Prompt, Sampling, TextPart
from engine.schedule.request import ImagePrompt
from engine.schedule.runner import SampleParams
from tests.e2e.prompts import png

pytest.importorskip("vllm.multimodal.media")  # what fails in an import keeps its frames
pytestmark = pytest.mark.anyio


class Llm:
    """In vLLM's place: it takes a prompt, looks at its pixels, and answers without an end."""

    def __init__(self) -> None:
        self.pixels: Any = None

    async def add_request(self, order_id: str, prompt: Any, *_: Any, **more: Any) -> "Llm":
        [picture] = prompt["multi_modal_data"]["image"]
        assert picture.size == (112, 84)
        self.pixels = weakref.ref(picture)
        return self

    async def get(self) -> Any:
        completion = SimpleNamespace(token_ids=[5], finish_reason=None)
        return SimpleNamespace(outputs=[completion], metrics=None, finished=False)


async def test_neither_files_nor_pixels_are_held_while_vllm_answers() -> None:
    llm = Llm()
    file = png()
    core = VllmCore(llm, 100, takes_seeds=False, is_owner=False)
    before = sys.getrefcount(file)
    image_prompt = ImagePrompt([1, 2, 3], [Image("0" * 64, "image/png", file, 112, 84)])
    order = Order(
        order_id="one",
        scope="s",
        token_ids=[1, 2, 2, 3],
        request=GenerateRequest(
            request_id="one",
            scope="s",
            prompt=Prompt([Message("user", [TextPart("a")])]),
            sampling=Sampling(max_tokens=9),
        ),
        sample=SampleParams(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        max_tokens=9,
        image_prompt=image_prompt,
    )
    outputs = core.generate(order, Directive(request_id="one", scope="s", wants=[]))
    del order, image_prompt
    references = sys.getrefcount(file)
    assert list((await anext(outputs)).token_ids) == [5]
    gc.collect()  # what decodes a file refers to itself
    after = sys.getrefcount(file)
    assert (llm.pixels(), after) == (None, before) and references > before
