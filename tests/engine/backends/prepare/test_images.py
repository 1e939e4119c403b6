"""Images of a prompt in the preparing process, and where tokens are when they have theirs."""

from array import array
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from engine.backends.prepare.images import Expanded, Widening, keys_of, widened
from engine.backends.prepare.prepared import COUNT, GENERATE, Counted, Job, Prepared, Refused
from engine.backends.prepare.preparer import Preparer
from engine.errors import InvalidRequest
from engine.protocol import (
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    Breakpoint,
    CountRequest,
    Image,
    Message,
    Name,
    Prompt,
    TextPart,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.files import read_prompt_files
from engine.text.renderer import ChatRenderer
from tests.e2e.prompts import png
from tests.engine.backends.local import SCOPE, description, request
from tests.engine.text.templates import DEMO_MODEL

PLACE = "<image>"


def image(number: int, **changed: Any) -> Image:
    fields = {"id": f"{number:064x}", "media_type": "image/png", "width": 112, "height": 84}
    return Image(**{**fields, "data": png(), **changed})


def renderer() -> ChatRenderer:
    files = read_prompt_files(str(DEMO_MODEL))
    files.tokenizer.add_special_tokens([AddedToken(PLACE, special=True)])
    return ChatRenderer(files, image_text=PLACE)


@pytest.fixture(scope="module")
def seeing() -> Preparer:
    can = ["tools", "images", "own_template"]
    return Preparer(renderer(), description(capabilities=can, granularity=4))


def turn(*texts: str, images: list[Image]) -> Prompt:
    return Prompt([Message("user", [TextPart(text) for text in texts])], images=images)


def prepared(preparer: Preparer, prompt: Prompt, **more: Any) -> Prepared:
    generate_request = request(prompt, **more)
    answer = preparer.answer(Job(GENERATE, msgspec.json.encode(generate_request)))
    assert isinstance(answer, Prepared), answer
    return answer


def test_a_prompt_has_one_place_an_image_and_none_that_a_client_wrote(seeing: Preparer) -> None:
    first_image = image(1)
    second_image = image(2)
    call = ToolUsePart("c", "shot", {})
    result = ToolResultPart("c", f"A {second_image.reference}\nB")
    text = f"{PLACE} and {image(3).reference}"
    prompt = Prompt(
        [
            Message("user", [TextPart(text), TextPart(first_image.reference)]),
            Message("assistant", [call]),
            Message("user", [result, TextPart(first_image.reference)]),
        ],
        images=[first_image, second_image],
    )
    place = renderer().tokenizer.token_to_id(PLACE)
    answer = prepared(seeing, prompt)
    assert [part.id for part in answer.images] == [first_image.id, second_image.id, first_image.id]
    assert array("I", answer.token_ids).tolist().count(place) == 3
    counted = seeing.answer(Job(COUNT, msgspec.json.encode(CountRequest(SCOPE, prompt))))
    assert isinstance(counted, Counted)
    assert (counted.token_ids, counted.images) == (answer.token_ids, answer.images)


def test_what_stands_behind_an_image_moves_by_its_tokens(seeing: Preparer) -> None:
    first_image = image(1)
    second_image = image(2)
    prompt = turn(
        "Look",
        first_image.reference,
        "then",
        second_image.reference,
        "well",
        images=[first_image, second_image],
    )
    names = [Name(f"{segment:016x}", segment) for segment in range(5)]
    compact = prepared(seeing, prompt, names=names, breakpoints=[Breakpoint(1)])
    tokens = array("I", compact.token_ids).tolist()
    place = renderer().tokenizer.token_to_id(PLACE)
    first, second = (at for at, token in enumerate(tokens) if token == place)
    whole = [
        *tokens[:first],
        *[7] * 9,
        *tokens[first + 1 : second],
        *[7] * 5,
        *tokens[second + 1 :],
    ]
    places = [first, second]
    expanded = Expanded(whole, [(first, 9), (second + 8, 5)], places)
    wide = widened(compact, expanded, description(granularity=4))
    assert array("I", wide.token_ids).tolist() == whole
    before = [segment.end for segment in compact.segments]
    moved = [end + grown for end, grown in zip(before, (0, 8, 8, 12, 12), strict=True)]
    assert [segment.end for segment in wide.segments] == [end // 4 * 4 for end in moved]
    assert [name.tokens for name in wide.names] == moved
    # What stands in an image's place is known by its digest, and everything else by its tokens.
    keys = array("I", wide.keys).tolist()
    assert (
        keys[:first] == whole[:first] and keys[first + 9 : second + 8] == tokens[first + 1 : second]
    )
    assert min(keys[first : first + 9]) >= 1 << 31
    other_keys = array("I", keys_of(expanded, [image(4), second_image])).tolist()
    assert all(
        key != other_key
        for key, other_key in zip(keys[first:][:9], other_keys[first:][:9], strict=True)
    )
    assert other_keys[second + 8 :] == keys[second + 8 :]
    for wrong in (
        Expanded(whole, [(first + 1, 9), (second + 8, 5)], places),
        Expanded([*whole, 3], expanded.spans, places),
        Expanded(whole, [(first, 9), (first, 9)], places),
        Expanded(whole, expanded.spans, places[:1]),
    ):
        with pytest.raises(InvalidRequest, match="not where the template put them"):
            Widening(tokens, wrong)


def test_a_token_that_was_joined_with_an_image_is_the_image() -> None:
    """As Gemma 3's processor does with line breaks: 1 is one, 2 two of them, 3 three, 4 four."""
    token_ids = [2, 90, 7, 7, 91, 2]
    for rendered, whole, spans, ends in (
        # Text, break, image, break, text.
        ([5, 1, 90, 1, 6], [5, 3, *token_ids[1:5], 3, 6], [(1, 6)], [1, 1, 6, 7, 8]),
        # One image behind the other: the breaks between them are one token.
        (
            [5, 90, 90, 6],
            [5, *token_ids[:5], 4, *token_ids[1:], 6],
            [(1, 6), (6, 6)],
            [1, 7, 12, 13],
        ),
        # Only behind, and only in front.
        ([90, 1, 5], [*token_ids[:5], 3, 5], [(0, 6)], [5, 6, 7]),
        ([1, 90, 5], [3, *token_ids[1:], 5], [(0, 6)], [0, 6, 7]),
        ([5, 90, 6], [5, *token_ids, 6], [(1, 6)], [1, 7, 8]),
    ):
        places = [at for at, token in enumerate(rendered) if token == 90]
        expanded = Expanded([*whole], spans, places)
        widening = Widening(rendered, expanded)
        assert [widening.end(at + 1) for at in range(len(rendered))] == ends
        for at in range(len(rendered)):
            if at not in places and 1 < rendered[at]:
                changed = [*rendered[:at], 9, *rendered[at + 1 :]]
                with pytest.raises(InvalidRequest, match="not where the template put them"):
                    Widening(changed, expanded)
    # Where the token is another one, so are the image's keys.
    images = [image(1)]
    first, second = (
        keys_of(Expanded([*token_ids[:5], last], [(0, 6)], [0]), images) for last in (2, 3)
    )
    assert first[:20] == second[:20] and first[20:] != second[20:]


@pytest.mark.parametrize(
    "broken",
    [
        {"data": png()[:-30]},
        {"data": png(113, 84)},
        {"data": b"<svg></svg>"},
        {"data": png(), "width": MAX_IMAGE_PIXELS},
    ],
    ids=["torn", "larger", "none", "lying"],
)
def test_a_broken_image_is_refused_by_reference(seeing: Preparer, broken: dict[str, Any]) -> None:
    number = 10 + len(str(broken))
    bad = image(number, **broken)
    good = image(1)
    prompt = turn(good.reference, bad.reference, images=[good, bad])
    for wire_request in (request(prompt), CountRequest(SCOPE, prompt)):
        kind = COUNT if isinstance(wire_request, CountRequest) else GENERATE
        answer = seeing.answer(Job(kind, msgspec.json.encode(wire_request)))
        assert isinstance(answer, Refused) and answer.code == "invalid_request"
        if "width" not in broken:
            assert answer.is_public
            assert answer.message == f"{bad.reference}: Could not process image"


def test_an_image_that_a_text_repeats_counts_each_time(seeing: Preparer) -> None:
    picture = image(1)
    prompt = turn(*[picture.reference] * (MAX_IMAGES + 1), images=[picture])
    for wire_request in (request(prompt), CountRequest(SCOPE, prompt)):
        kind = COUNT if isinstance(wire_request, CountRequest) else GENERATE
        answer = seeing.answer(Job(kind, msgspec.json.encode(wire_request)))
        assert isinstance(answer, Refused) and "at most 100" in answer.message


def test_an_engine_that_reads_text_refuses_images() -> None:
    picture = image(1)
    generate_request = request(turn(picture.reference, images=[picture]))
    preparer = Preparer(renderer(), description(capabilities=["own_template"]))
    answer = preparer.answer(Job(GENERATE, msgspec.json.encode(generate_request)))
    assert isinstance(answer, Refused) and answer.code == "unsupported"
