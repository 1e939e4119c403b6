from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import (
    MAX_NAMES,
    Document,
    Message,
    Name,
    Prompt,
    TextPart,
    Tool,
    ToolUsePart,
)
from engine.protocol.reports import AdapterInfo
from gateway.prompt.approximate import Approximate, name_documents
from gateway.prompt.names import (
    MAX_STEP,
    NAMES_RULE,
    find_prefixes,
    trim_names,
)
from tests.gateway.bodies import conversation, lowered


def name_prefixes(whole: Prompt, scope: str, keep: Collection[int] = ()) -> list[Name]:
    """The names that go out with a request."""
    return [prefix.name for prefix in trim_names(find_prefixes(whole, scope), keep)]


def prompt(*texts: str) -> Prompt:
    return Prompt([Message("user", [TextPart(value) for value in texts])])


def test_another_scope_shares_no_name() -> None:
    conversation_prompt = lowered(conversation()).plan.prompt
    ours, theirs = (
        {n.digest for n in name_prefixes(conversation_prompt, who)} for who in ("ours", "theirs")
    )
    assert len(ours) == len(theirs) == conversation_prompt.num_segments and not ours & theirs


def test_names_inside_a_text_are_dense_in_front_and_sparse_behind() -> None:
    names = name_prefixes(prompt("é" * 90_000, "end"), "s")
    inner = [*range(1024, 16_384, 1024), *range(16_384, 32_768, 2048), *range(32_768, 65_536, 4096)]
    inner += range(65_536, 90_000, MAX_STEP)
    expected = [*((0, characters) for characters in inner), (0, None), (1, None)]
    assert [(n.segment, n.characters) for n in names] == expected


@given(st.integers(0, 40_000), st.integers(1, 9000))
def test_texts_that_part_inside_a_segment_share_a_name_close_before(
    alike: int, behind: int
) -> None:
    """At most 2,048 characters before, within the first 32,768."""
    first = name_prefixes(prompt("x" * alike + "y" * behind), "s")
    second = name_prefixes(prompt("x" * alike + "z" * behind), "s")
    shared = {n.digest for n in first} & {n.digest for n in second}
    deepest = max((n.characters or 0 for n in first if n.digest in shared), default=0)
    assert (
        alike - (1024 if alike < 16_384 else 2048 if alike < 32_768 else 4096) <= deepest <= alike
    )


def test_the_marked_ends_the_front_and_the_deepest_ends_survive_the_bound() -> None:
    names = name_prefixes(prompt(*(str(number) for number in range(1000))), "s", keep={3, 100})
    assert len(names) == MAX_NAMES
    assert [n.segment for n in names] == [*range(64), 100, *range(1000 - MAX_NAMES + 65, 1000)]


def test_names_inside_texts_give_way_to_segment_ends() -> None:
    texts = ["x" * MAX_STEP * 8] * 200
    names = name_prefixes(prompt(*texts), "s")
    assert len(names) == MAX_NAMES
    assert sum(name.characters is None for name in names) == 200


def test_every_gateway_gives_these_names() -> None:
    """Names are compared between gateways, so they change with `NAMES_RULE` alone."""
    tools = [Tool("look", {"type": "object"}, "Looks.")]
    called = Message("assistant", [ToolUsePart("1", "look", {"at": "é"})])
    named_prompt = Prompt(
        [Message("user", [TextPart("é" * 1500)]), called], tools, [TextPart("rules")]
    )
    assert NAMES_RULE == 2
    digests = "b590d37a91509292 e07ef8c3025f7eb7 b177702f0d57f632 3fd563b3d9ef0ab6 2aaf7df772143bb4"
    assert " ".join(name.digest for name in name_prefixes(named_prompt, "scope")) == digests


@given(st.lists(st.text(min_size=1), min_size=1, max_size=4), st.data())
def test_names_are_equal_exactly_as_far_as_the_content_is(
    texts: list[str], data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(texts) - 1))
    changed = [*texts]
    changed[place] += "!"
    before = name_prefixes(prompt(*texts), "s")
    after = name_prefixes(prompt(*changed), "s")
    equal = [a.digest == b.digest for a, b in zip(before, after, strict=True)]
    assert equal == [index < place for index in range(len(texts))]


@given(st.lists(st.text(min_size=1), min_size=2, max_size=4))
def test_where_blocks_divide_is_part_of_the_name(texts: list[str]) -> None:
    joined = name_prefixes(prompt("".join(texts)), "s")
    apart = name_prefixes(prompt(*texts), "s")
    assert joined[-1].digest != apart[-1].digest


def test_names_behind_an_adapters_beginning_are_its_own() -> None:
    """In front of an invocation they are the base model's, as keys and values are."""
    turns = [Message("user", [TextPart("a"), TextPart("now judge this"), TextPart("b")])]
    prompt = Prompt(turns, system=[TextPart("s")])

    def names(weights: str, invocation: str | None = None) -> list[str]:
        info = AdapterInfo(
            name="x", digest=weights * 64, rank=1, num_bytes=1, invocation=invocation
        )
        return [prefix.name.digest for prefix in find_prefixes(prompt, "scope", info)]

    base = [prefix.name.digest for prefix in find_prefixes(prompt, "scope")]
    for adapter_names in (names("1"), names("2")):
        assert len(adapter_names) == len(base) and not set(adapter_names) & set(base)
    assert not set(names("1")) & set(names("2"))
    activated = names("1", "judge")
    assert activated[:2] == base[:2] and not set(activated[2:]) & {*base, *names("1")}
    assert names("1", "never said") == base


def test_a_document_has_one_name_wherever_it_stands_and_none_of_another_scope() -> None:
    contents = ["An été. ", "x" * 40_000, "z"]
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
    by_text: dict[str, list[set[str]]] = {}
    for scope in ("ours", "theirs"):
        for order in orders:
            documents_prompt = prompt("", *(contents[n] for n in order))
            documents = [Document(1 + place) for place in range(3)]
            salts = Approximate(documents=documents).salts
            prefixes = find_prefixes(documents_prompt, scope, salts=salts)
            named, places = name_documents(documents_prompt, scope, documents, prefixes)
            sizes = [len(contents[n].encode()) for n in order]
            assert [end - begin for begin, end in places] == sizes
            assert places[-1][1] == prefixes[-1].num_bytes
            texts = [by_text.setdefault(f"{scope} {n}", []) for n in order]
            for names, document in zip(texts, named, strict=True):
                names.append({document.name})
    assert all(len(set.union(*names)) == 1 for names in by_text.values())
    assert len(set.union(*(names[0] for names in by_text.values()))) == 6
