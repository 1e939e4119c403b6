"""What can be told from two sketches, and how large one gets."""

import random

import msgspec

from engine.protocol import (
    Message,
    Prompt,
    Role,
    TextPart,
    Tool,
)
from gateway.prompt.fingerprint import MAX_POINTS, Fingerprint, kinds_at, pack, points_of, unpack
from gateway.prompt.names import Recent, find_prefixes
from gateway.prompt.sketch import (
    DIGEST_BYTES,
    MAX_SEGMENTS,
    MAX_TEXTS,
    PIECE_BYTES,
    PIECES,
    SKETCHED_BYTES,
    Sketch,
    Sketched,
    kinds_of,
    sketch_of,
)

LINES = [f"Rule {number}: say no more than {number} words." for number in range(40)]


def digests(sketch: Sketch) -> list[bytes]:
    own = sketch.own
    return [own[at : at + DIGEST_BYTES] for at in range(0, len(own), DIGEST_BYTES)]


def pieces(sketch: Sketch, segment: int) -> list[bytes]:
    found = dict(sketch.pieces)[segment]
    return [found[at : at + PIECE_BYTES] for at in range(0, len(found), PIECE_BYTES)]


def system(*texts: str) -> Prompt:
    return Prompt([Message("user", [TextPart("x")])], system=[TextPart(text) for text in texts])


def test_another_scope_gives_other_digests() -> None:
    one, other = sketch_of(system("\n".join(LINES)), "a"), sketch_of(system("\n".join(LINES)), "b")
    assert not set(digests(one)) & set(digests(other))
    assert not set(pieces(one, 0)) & set(pieces(other, 0))


def test_a_sketch_is_bounded() -> None:
    many = sketch_of(system(*(f"{n} " + "word " * 40 for n in range(3000))), "scope")
    assert len(digests(many)) == len(many.sizes) == MAX_SEGMENTS
    assert len(many.pieces) == MAX_TEXTS
    assert all(len(each) <= PIECES * PIECE_BYTES for _, each in many.pieces)
    assert len(msgspec.msgpack.encode(many)) < 1500
    large = sketch_of(system("a" * SKETCHED_BYTES, "b"), "scope")
    assert large.own == b""


def test_of_a_long_prompt_the_last_points_stay_with_their_tokens_and_kinds() -> None:
    prompt = Prompt([Message("user", [TextPart(str(n))]) for n in range(900)])
    prefixes = find_prefixes(prompt, "scope")
    points = points_of(prefixes)
    packed = pack(
        Fingerprint(
            model="m",
            parameters=b"",
            num_tools=0,
            num_system=0,
            points=points,
            tokens=[10 * (n + 1) for n in range(900)],
            kinds=kinds_at(points, kinds_of(prompt)),
            marks=[(899, "5m")],
            sketch=sketch_of(prompt, "scope"),
        )
    )
    found = unpack(packed)
    assert len(packed) < 5000
    assert len(found.points) == len(found.tokens) == len(found.kinds) <= MAX_POINTS
    assert [point.segment for point in found.points[-20:]] == list(range(880, 900))
    assert all(
        tokens == 10 * (p.segment + 1) for p, tokens in zip(found.points, found.tokens, strict=True)
    )
    assert found.marks == [(899, "5m")]


def test_what_is_known_of_a_prefix_gives_the_sketch_that_would_be_made_anew() -> None:
    """Conversations that grow, are edited in the middle and share beginnings, in two scopes."""
    chance, known = random.Random(7), Recent[Sketched](40)
    texts = ["a short one", "\n".join(LINES), "word " * 300, "x" * 200, "x" * SKETCHED_BYTES]
    for _ in range(300):
        scope = chance.choice(["one", "another"])
        roles: list[Role] = ["user", "assistant", "system"]
        prompt = Prompt(
            [
                Message(chance.choice(roles), [TextPart(chance.choice(texts))])
                for _ in range(chance.randrange(1, 12))
            ],
            [Tool("look", {"b": 1, "a": chance.randrange(2)})],
            [TextPart(chance.choice(texts)) for _ in range(chance.randrange(3))],
        )
        names = [name for name, _ in find_prefixes(prompt, scope)]
        ends = [name.digest for name in names if name.characters is None]
        assert sketch_of(prompt, scope, ends, known) == sketch_of(prompt, scope)
        assert len(known) <= 80
