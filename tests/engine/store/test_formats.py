"""The files of the store: whatever happens to one, it is whole or it is a miss with a reason."""

import msgspec
import pytest

from engine.cache.digests import ChainHasher, pack
from engine.cache.ids import Digest
from engine.cache.store_tier import BlockKey
from engine.protocol import HeldName
from engine.store.files import StoreKeys, decode, encode_header, fingerprint
from engine.store.journal import (
    End,
    Put,
    Times,
    Touch,
    decode_line,
    encode_line,
    replay,
)

KEYS = StoreKeys(bytes(range(32)))
MODEL = fingerprint({"weights": "a", "dtype": "float32"})
PAYLOAD = bytes(range(256)) * 3


def a_key(tokens: tuple[int, ...] = (1, 2, 3, 4), scope: str = "red", index: int = 0) -> BlockKey:
    hasher = ChainHasher(KEYS.chain, 4)
    root = hasher.root(scope)
    digest = hasher.extend(root, pack(tokens))
    return BlockKey(KEYS.name_of(digest), root, digest, root, index, pack(tokens))


def encode(key: BlockKey, payload: bytes = PAYLOAD, model: bytes = MODEL) -> bytes:
    return encode_header(key, payload, model) + payload


KEY = a_key()
FILE = encode(KEY)


def reason_of(data: bytes) -> str | None:
    content = decode(data, KEY, MODEL, len(PAYLOAD))
    return None if content == PAYLOAD else str(content)


def test_a_whole_file_is_read_back_and_every_single_flipped_bit_is_a_miss() -> None:
    assert reason_of(FILE) is None
    for position in range(len(FILE) * 8):
        flipped = bytearray(FILE)
        flipped[position // 8] ^= 1 << position % 8
        assert reason_of(bytes(flipped)) == "checksum", f"bit {position}"


def test_no_file_of_two_is_one() -> None:
    """Not even one whose second half begins with its own checksum."""
    second_file = encode(a_key((5, 6, 7, 8), "blue"), PAYLOAD[::-1])
    for cut in range(1, len(FILE)):
        if FILE[cut:] != second_file[cut:]:
            assert reason_of(FILE[:cut] + second_file[cut:]) == "checksum", cut


def test_every_truncation_and_every_longer_file_is_a_miss() -> None:
    for length in range(len(FILE)):
        assert reason_of(FILE[:length]) == "short"
    assert reason_of(FILE + b"\0") == "short"


@pytest.mark.parametrize(
    "data",
    [
        encode(KEY, model=fingerprint({"weights": "b"})),
        encode(a_key((4, 3, 2, 1))),
        encode(a_key(scope="blue")),
        encode(KEY._replace(packed=pack((7, 7, 7, 7)))),
        encode(KEY._replace(place=5)),
        encode(KEY._replace(parent=Digest(bytes(16)))),
        FILE[: -len(PAYLOAD)] + PAYLOAD[::-1],
    ],
)
def test_a_file_of_other_content_is_a_miss(data: bytes) -> None:
    assert reason_of(data) == "checksum"


def test_names_tell_neither_content_nor_scope_nor_secret() -> None:
    names = [a_key((1, 2, 3, n), scope).name for n in range(50) for scope in ("red", "blue")]
    assert len(set(names)) == 100
    assert len({name[:4] for name in names}) > 95, "names of one scope begin alike"
    other_keys = StoreKeys(bytes(32))
    assert other_keys.name_of(KEY.digest) != KEY.name
    assert KEY.digest.hex() not in KEY.name and KEY.owner.hex() not in KEY.name


def a_put(key: str = "aa", left: float = 100.0, model: str = "m") -> Put:
    times = Times(at=1000.0, left=left, idle=0.0, age=1.0, is_leased=True, reads=0)
    return Put(
        key=key,
        model=model,
        scope="red",
        packed=pack(range(6)),
        ttl="1h",
        seconds=None,
        name=None,
        names={0: [HeldName("n1", 4)]},
        times=times,
    )


def test_the_journal_tells_what_had_not_ended() -> None:
    late = msgspec.structs.replace(a_put().times, left=900.0)
    records = [a_put(), a_put("bb"), Touch(key="aa", times=late), End(key="bb"), End(key="zz")]
    lines = [encode_line(record, KEYS) for record in records]
    replayed = replay(lines, "m", KEYS)
    assert list(replayed.entries) == ["aa"] and not replayed.damages
    assert replayed.entries["aa"].times.left == 900.0
    assert replayed.entries["aa"].names == {0: [HeldName("n1", 4)]}


def test_a_flipped_bit_costs_its_own_record_alone() -> None:
    lines = b"".join(encode_line(a_put(key), KEYS) for key in ("aa", "bb", "cc"))
    first, second = (position for position, byte in enumerate(lines[:-1]) if byte == ord("\n"))
    for position in range(first + 1, second):
        for bit in range(8):
            flipped = bytearray(lines)
            flipped[position] ^= 1 << bit
            replayed = replay(bytes(flipped).splitlines(keepends=True), "m", KEYS)
            assert {"aa", "cc"} >= set(replayed.entries) and "aa" in replayed.entries
            assert replayed.damages["checksum"] >= 1


def test_a_journal_that_ends_within_a_line_loses_that_line() -> None:
    lines = encode_line(a_put("aa"), KEYS) + encode_line(a_put("bb"), KEYS)
    first = lines.index(b"\n") + 1
    for length in range(first, len(lines) - 1):
        replayed = replay(lines[:length].splitlines(keepends=True), "m", KEYS)
        assert list(replayed.entries) == ["aa"]
        assert sum(replayed.damages.values()) == (length > first)


def test_lines_of_another_model_or_installation_are_none() -> None:
    assert decode_line(encode_line(a_put(), StoreKeys(bytes(32))), KEYS) is None
    replayed = replay([encode_line(a_put(model="other"), KEYS)], "m", KEYS)
    assert not replayed.entries and replayed.damages == {"other_model": 1}
