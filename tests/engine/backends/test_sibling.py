"""The file of a profile: of these weights and settings, and of a pair that the gate allows."""

from pathlib import Path

import msgspec
import pytest

from engine.backends.sibling import Profile, fingerprints_of, read_sibling
from engine.compute.errors import ModelRefused
from engine.protocol.reports import Technique

OWN = {"weights": "a1", "torch": "2.13"}
THEIRS = {"weights": "b2", "torch": "2.13"}


def written(path: Path, *kls: float) -> str:
    """A profile whose rows have 0, 1, … own layers. It says of all that they are allowed."""
    rows = [
        Technique(
            method="sibling",
            parameter=num_layers,
            kl=kl,
            agreement=0.9,
            tokens=512,
            is_allowed=True,
        )
        for num_layers, kl in enumerate(kls)
    ]
    profile = Profile(own=fingerprints_of(OWN), sibling=fingerprints_of(THEIRS), techniques=rows)
    path.write_bytes(msgspec.json.encode(profile))
    return str(path)


def test_the_least_layers_from_which_on_all_are_allowed_are_computed(tmp_path: Path) -> None:
    path = written(tmp_path / "profile", 0.9, 0.4, 0.6, 0.3, 0.2, 0.0)
    sibling, rows = read_sibling(path, OWN)
    assert (sibling.own_layers, sibling.num_layers) == (3, 5)
    assert sibling.model.hex() == fingerprints_of(THEIRS).fingerprint
    assert [row.is_allowed for row in rows] == [False, True, False, True, True, True]


@pytest.mark.parametrize(
    ("facts", "kls", "why"),
    [
        ({**OWN, "weights": "c3"}, (0.1, 0.0), "is a profile of other weights"),
        (THEIRS, (0.1, 0.0), "is a profile of other weights"),
        ({**OWN, "torch": "2.14"}, (0.1, 0.0), "other settings or versions: profile it anew"),
        (OWN, (0.9, 0.6, 0.0), "the gate refuses the pair\\n own layers"),
    ],
)
def test_what_is_not_of_this_engine_or_too_far_is_refused_by_name(
    tmp_path: Path, facts: dict[str, str], kls: tuple[float, ...], why: str
) -> None:
    with pytest.raises(ModelRefused, match=f"ENGINE_SIBLING: .*{why}"):
        read_sibling(written(tmp_path / "profile", *kls), facts)


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}")
    for name in ("other", "missing"):
        with pytest.raises(ModelRefused, match="is no profile of a sibling"):
            read_sibling(str(tmp_path / name), OWN)
