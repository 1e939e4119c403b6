"""The scripts that the document names: those that pages want, all that these import, no others."""

from dashboard.access import index, preload


def test_each_wanted_script_is_there() -> None:
    """A Streamlit that names them otherwise fails here, and pages would only be slower."""
    found = preload.scripts()
    for name in preload.WANTED:
        assert any(script.startswith(f"{name}.") for script in found), name
    assert len(found) == len(set(found))


def test_what_they_import_is_there_too() -> None:
    found = set(preload.scripts())
    assert len(found) > len(preload.WANTED)
    for name in found:
        text = (preload.FOLDER / name).read_text("utf-8")
        assert {match[1] for match in preload._IMPORT.finditer(text)} <= found, name
    assert not any(script.startswith(("PlotlyChart.", "EChartsChart.")) for script in found)


def test_the_document_names_them_in_its_head() -> None:
    head = index.document().split("</head>")[0]
    for name in preload.scripts():
        assert f'<link rel="modulepreload" href="./static/js/{name}">' in head
