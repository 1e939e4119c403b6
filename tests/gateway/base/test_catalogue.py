"""The models that the catalogue offers, from its table and from what the engines serve."""

from engine.protocol.reports import AdapterInfo
from gateway.base.catalogue import Catalogue, CatalogueModel, Served

STYLE = AdapterInfo(name="style", digest="ab" * 32, rank=8, num_bytes=1)


def test_an_id_that_hides_a_served_model_hides_its_adapters_too() -> None:
    table = [CatalogueModel(id="qwen", display_name="Qwen", engine_model="llama")]
    catalogue = Catalogue(table, None, claude_alias=False)
    served = Served(["qwen", "llama"], [("qwen", STYLE), ("llama", STYLE)])
    assert [model.id for model in catalogue.models(served)] == ["qwen", "llama", "qwen:style"]
    assert {model.engine_model for model in catalogue.models(served)} == {"llama"}
