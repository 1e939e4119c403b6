"""The scripts that the document names: those that pages want, all that these import, no others."""

from pathlib import Path

import pytest

from dashboard.access import index, preload


def test_each_wanted_script_is_there() -> None:
    """Where a version of Streamlit names them otherwise, this fails and pages are only slower."""
    found = preload.scripts(preload.manifest())
    for name in preload.WANTED:
        assert any(Path(file).name.startswith(f"{name}.") for file in found), name
    assert len(found) == len(set(found))
    assert all((preload.FOLDER / file).is_file() for file in found)


def test_what_they_import_is_there_too_and_nothing_else() -> None:
    chunks = preload.manifest()
    found = set(preload.scripts(chunks))
    assert len(found) > len(preload.WANTED)
    for chunk in chunks.values():
        if chunk["file"] in found:
            assert {chunks[key]["file"] for key in chunk.get("imports", [])} <= found
    assert not any("PlotlyChart" in file or "EChartsChart" in file for file in found)


def test_the_document_names_them_in_its_head() -> None:
    head = index.document().split("</head>")[0]
    for file in preload.scripts(preload.manifest()):
        assert f'<link rel="modulepreload" href="./{file}">' in head


@pytest.mark.parametrize("text", [None, "no json", '{"a.js": {"file": "static/js/a.js"}}'])
def test_a_streamlit_without_a_manifest_or_these_names_has_no_links(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    monkeypatch.setattr(preload, "FOLDER", tmp_path)
    assert preload.scripts(preload.manifest()) == []
