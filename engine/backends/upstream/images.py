"""Images at a server that is not ours: whether it sees them, and how many tokens they have there.

Only the server knows how many tokens its processor makes of an image. It is asked once about each
image, which stands alone in a prompt. It is also asked about a prompt's images together if the
prompt has more images than any prompt that was asked about before.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any
from uuid import uuid4

import structlog

from engine.backends.external import Order
from engine.backends.prepare.images import MAX_KNOWN, Expanded, Widening
from engine.backends.upstream.server import (
    Facts,
    UpstreamBusy,
    UpstreamError,
    UpstreamGone,
    UpstreamRejected,
)
from engine.backends.upstream.servers import Server
from engine.cache.ids import TokenId
from engine.errors import EngineError, ImageRefused, InvalidRequest
from engine.protocol import GenerateRequest, Image, Message, Part, Prompt, Sampling, TextPart, Tool
from engine.schedule.request import ImagePrompt
from engine.schedule.runner import SampleParams
from engine.text.renderer import ChatRenderer

log = structlog.get_logger()
MAX_ASKED = 2
"""The most questions about images that a server is asked at a time."""
TRIED_WORDS = 32
"""The words behind the image of a trial, each of 32 hexadecimal digits. They fill blocks that could
be reused."""
_ANY = Image("0" * 64, "image/png", b"", 1, 1)


class ImageCounts:
    """How many tokens images have at a server. Used on one event loop."""

    def __init__(self, server: Server, renderer: ChatRenderer) -> None:
        self._server = server
        self._token = renderer.tokenizer.token_to_id(renderer.image_text)
        alone = trial_order(renderer, trial_request(_ANY.reference, images=[_ANY]))
        self._num_around = len(alone.token_ids) - 1
        self._lengths: dict[str, int] = {}
        self._most = 1
        self._asking = asyncio.Semaphore(MAX_ASKED)

    async def expand(self, image_prompt: ImagePrompt) -> Expanded:
        """The prompt's tokens with those of its images.

        Raises ImageRefused for an image that the server does not take, and UpstreamError.
        """
        if len(self._lengths) > MAX_KNOWN:
            self._lengths.clear()
        lengths = list[int]()
        for image in image_prompt.images:
            if image.id not in self._lengths:
                length = await self._ask([image]) - self._num_around
                if length <= 0:
                    raise UpstreamError("the server counted no tokens of an image")
                self._lengths[image.id] = length
            lengths.append(self._lengths[image.id])
        if len(image_prompt.images) > self._most:
            await self._ask(image_prompt.images)
            self._most = max(self._most, len(image_prompt.images))
        prompt_ids = list(image_prompt.token_ids)
        places = [place for place, token in enumerate(prompt_ids) if token == self._token]
        if len(places) != len(lengths):
            raise InvalidRequest("the prompt's images are not where the template put them")
        token_ids = list[TokenId]()
        spans = list[tuple[int, int]]()
        end = 0
        for place, length in zip(places, lengths, strict=True):
            token_ids += prompt_ids[end:place]
            spans.append((len(token_ids), length))
            token_ids += prompt_ids[place : place + 1] * length
            end = place + 1
        token_ids += prompt_ids[end:]
        return Expanded(token_ids, spans, places)

    async def _ask(self, images: Sequence[Image]) -> int:
        request = trial_request(*(image.reference for image in images), images=images)
        async with self._asking:
            try:
                return await self._server.count(_order(request, ()))
            except UpstreamRejected:
                raise ImageRefused(images[-1]) from None


def trial_request(
    *texts: str,
    images: Sequence[Image] = (),
    tools: Sequence[Tool] = (),
    scope: str = "",
    **more: Any,
) -> GenerateRequest:
    """One message of a user, for the server alone."""
    parts: list[Part] = [TextPart(text) for text in texts]
    return GenerateRequest(
        request_id=uuid4().hex,
        scope=scope or uuid4().hex,
        prompt=Prompt([Message("user", parts)], [*tools], images=[*images]),
        sampling=Sampling(max_tokens=None, temperature=0.0),
        **more,
    )


def trial_order(renderer: ChatRenderer, request: GenerateRequest, max_tokens: int = 1) -> Order:
    return _order(request, renderer.render(request.prompt, thinking=False).token_ids, max_tokens)


def _order(request: GenerateRequest, token_ids: Sequence[TokenId], max_tokens: int = 1) -> Order:
    images = request.prompt.images
    return Order(
        order_id=request.request_id,
        scope=request.scope,
        token_ids=token_ids,
        request=request,
        sample=SampleParams(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        max_tokens=max_tokens,
        image_prompt=ImagePrompt(token_ids, images) if images else None,
    )


async def tried(server: Server, renderer: ChatRenderer, facts: Facts) -> Facts:
    """The facts, with the capability `images` where the server sees them.

    A prompt with an image is sent, and then one whose image differs in one pixel. Of the second,
    nothing may be reused from the image on. Raises UpstreamGone and UpstreamBusy.
    """
    if not renderer.image_text or not server.TAKES_IMAGES:
        return facts
    try:
        first, second = (_image(red) for red in (0, 1))
        counts = ImageCounts(server, renderer)
        scope = uuid4().hex
        words = " ".join(uuid4().hex for _ in range(TRIED_WORDS))
        for image in (first, second):
            texts = "See", image.reference, words
            order = trial_order(renderer, trial_request(*texts, images=[image], scope=scope))
            assert order.image_prompt is not None
            expanded = await counts.expand(order.image_prompt)
            Widening(order.token_ids, expanded)
            piece = await server.prefill(replace(order, token_ids=expanded.token_ids))
        if (piece.cached_tokens or 0) > expanded.spans[0][0]:
            raise UpstreamError("it takes one image for another")
    except (UpstreamGone, UpstreamBusy):
        raise
    except (UpstreamError, EngineError, ImportError) as error:
        log.warning("the model may see images, and is shown none here", why=str(error))
        return facts
    ours = len(expanded.token_ids)
    if piece.prompt_tokens not in (None, ours):
        note = f"not told of prompts with images: it counts {piece.prompt_tokens} tokens of {ours}"
        facts = replace(facts, tells_note=f"{facts.tells_note}; {note}")
    return replace(facts, capabilities=facts.capabilities | {"images"})


def _image(red: int) -> Image:
    # Only engines of models that see need Pillow: what clients send is decoded with it too.
    from PIL import Image as Pillow

    picture = Pillow.new("RGB", (64, 64), (90, 90, 90))
    file = BytesIO()
    picture.putpixel((0, 0), (red, 90, 90))
    picture.save(file, "PNG")
    return Image(f"{red:064}", "image/png", file.getvalue(), 64, 64)
