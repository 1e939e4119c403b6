from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import MAX_NAMES, Message, Name, Prompt, TextPart
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.segments import lay_out
from gateway.prompt.names import CHUNK_CHARACTERS, name_prefixes
from tests.gateway.bodies import LONG, body, conversation, text, tool


def names(request: dict[str, Any], scope: str = "scope") -> list[Name]:
    layout = lay_out(decode_messages(msgspec.json.encode(request)))
    return name_prefixes(layout.prompt, scope)


def prompt(*texts: str) -> Prompt:
    return Prompt([Message("user", [TextPart(value) for value in texts])])


def test_markers_and_the_order_of_body_keys_do_not_change_names() -> None:
    plain = body(system=[text("rules")], tools=[tool()])
    marked = body(system=[text("rules", LONG)], tools=[tool(marker=LONG)], cache_control=LONG)
    backwards = dict(reversed(list(plain.items())))
    assert names(plain) == names(marked) == names(backwards)


def test_a_string_is_one_text_block() -> None:
    assert names(body(system="X")) == names(body(system=[text("X")]))


def test_the_order_of_keys_inside_a_schema_does_change_names() -> None:
    one = {"name": "t", "input_schema": {"type": "object", "properties": {}}}
    other = {"name": "t", "input_schema": {"properties": {}, "type": "object"}}
    assert names(body(tools=[one])) != names(body(tools=[other]))


def test_another_scope_shares_no_name() -> None:
    ours = {name.digest for name in names(conversation(), "ours")}
    assert not ours & {name.digest for name in names(conversation(), "theirs")}


def test_longer_texts_are_named_at_every_chunk() -> None:
    long = "é" * (2 * CHUNK_CHARACTERS + 1)
    found = name_prefixes(prompt(long, "end"), "s")
    assert [(n.segment, n.characters) for n in found] == [
        (0, CHUNK_CHARACTERS),
        (0, 2 * CHUNK_CHARACTERS),
        (0, None),
        (1, None),
    ]
    longer = name_prefixes(prompt(long + "more"), "s")
    assert [n.digest for n in longer[:2]] == [n.digest for n in found[:2]]
    assert longer[2].digest != found[2].digest


def test_the_deepest_ends_and_the_marked_ones_survive_the_bound() -> None:
    found = name_prefixes(prompt(*(str(number) for number in range(1000))), "s", keep={3})
    assert len(found) == MAX_NAMES
    assert [n.segment for n in found] == [3, *range(1000 - MAX_NAMES + 1, 1000)]


def test_chunks_give_way_to_segment_ends() -> None:
    texts = ["x" * CHUNK_CHARACTERS * 8] * 200
    found = name_prefixes(prompt(*texts), "s")
    assert len(found) == MAX_NAMES
    assert sum(name.characters is None for name in found) == 200


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.data())
def test_names_are_equal_exactly_as_far_as_the_content_is(
    texts: list[str], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(texts) - 1))
    changed = [*texts]
    changed[place] += "!"
    before, after = name_prefixes(prompt(*texts), "s"), name_prefixes(prompt(*changed), "s")
    equal = [a.digest == b.digest for a, b in zip(before, after, strict=True)]
    assert equal == [index < place for index in range(len(texts))]


@given(st.lists(st.text(min_size=1), min_size=2, max_size=4))
def test_where_blocks_divide_is_part_of_the_name(texts: list[str]) -> None:
    joined = name_prefixes(prompt("".join(texts)), "s")
    apart = name_prefixes(prompt(*texts), "s")
    assert joined[-1].digest != apart[-1].digest
