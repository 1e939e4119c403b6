"""The list of a journal's turns and its copies: what some of them lack another tells."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.journal.live_ids import Held, LiveIds, names_of, read


def written(folder: Path) -> list[Path]:
    """Lists that were begun with `a` and `s`; then `b` to `d` came, `a` and `b` went,
    and `s` was set aside."""
    paths = names_of(folder)
    ids = LiveIds(paths, "i", {}, Held(["a", "s"], [], 7, (1, 100)))
    ids.add(["b", "c"], [], [], (1, 300))
    ids.add(["d"], ["a", "b"], ["s"], (2, 50))
    ids.close()
    return paths


def no_damage(_: Path) -> None:
    return


def delete(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def take_another_file(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\x00" * 99)


def begin_earlier(path: Path) -> None:
    """As it was before it was last begun anew: `z` went meanwhile."""
    LiveIds([path], "i", {}, Held(["z"], [], 3, (1, 20))).close()


def lose_its_base(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if not line.startswith(b"*")))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    "damage", [no_damage, delete, cut, take_another_file, begin_earlier, lose_its_base]
)
def test_one_whole_list_is_enough(
    tmp_path: Path, which: int, damage: Callable[[Path], None]
) -> None:
    """`which` stays whole."""
    paths = written(tmp_path)
    for path in paths:
        if path != paths[which]:
            damage(path)
    told = read(paths)
    assert (told.instance, told.alive, told.num_forgotten) == ("i", {"c", "d"}, 9)
    assert list(told.forgotten) == ["a", "b"]
    assert told.aside == {"s"}
    assert told.end == (2, 50)


def test_lists_that_lack_different_lines_are_whole_together(tmp_path: Path) -> None:
    paths = written(tmp_path)
    for path, lost in zip(paths, (b"+c", b"-a", b"+d"), strict=True):
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(line for line in lines if not line.startswith(lost)))
    told = read(paths)
    assert (told.alive, told.num_forgotten) == ({"c", "d"}, 9)


def test_without_lists_nothing_is_told(tmp_path: Path) -> None:
    told = read(names_of(tmp_path))
    assert (told.instance, told.alive, told.num_forgotten) == (None, set(), 0)
    assert told.end == (0, 0)
