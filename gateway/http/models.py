"""GET /v1/models and GET /v1/models/{id}, for the SDKs of all dialects.

`speaking.py` says which shape a client gets. Google's clients ask at `/v1beta/models` too.
"""

from collections.abc import Callable, Mapping
from typing import Annotated

from litestar import Controller, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter, RawBody
from litestar.response.base import ASGIResponse
from msgspec import UNSET

from gateway.base.catalogue import CatalogueModel
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.response import ModelInfo, ModelList
from gateway.dialects.gemini import response as gemini
from gateway.dialects.openai import response as openai
from gateway.http.auth import KeyAuth
from gateway.http.generation import KeyRequest
from gateway.http.model_calls import call_gemini_model
from gateway.http.query import check_query
from gateway.http.services import Services
from gateway.http.speaking import dialect_of
from gateway.prompt.ask import Dialect

# The release date of an engine's own model is not known. The API allows the epoch for that.
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"


class ModelsController(Controller):
    path = "/v1/models"
    middleware = (KeyAuth,)
    before_request = staticmethod(check_query)

    @post("/{model_id:path}", status_code=200)
    async def call(
        self, request: KeyRequest, body: RawBody, model_id: FromPath[str]
    ) -> ASGIResponse:
        return await call_gemini_model(request, body, str(model_id))

    @get()
    async def list_models(
        self,
        request: KeyRequest,
        services: NamedDependency[Services],
        after_id: Annotated[str | None, QueryParameter(name="after_id")] = None,
        before_id: Annotated[str | None, QueryParameter(name="before_id")] = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 20,
    ) -> ModelList | openai.ModelList | gemini.ModelList:
        if after_id is not None and before_id is not None:
            raise InvalidRequest("after_id: excludes before_id")
        dialect = dialect_of(request.scope)
        if dialect == "gemini":
            return _gemini_models(request, services)
        if dialect == "openai":
            models = services.catalogue.models(services.fleet.served)
            return openai.ModelList(data=[_openai_model(model, services) for model in models])
        infos = [
            _info(model, services) for model in services.catalogue.models(services.fleet.served)
        ]
        ids = [info.id for info in infos]
        if after_id is not None:
            infos = infos[_position(ids, after_id, "after_id") + 1 :]
        elif before_id is not None:
            infos = infos[: _position(ids, before_id, "before_id")]
        page = infos[-limit:] if before_id is not None else infos[:limit]
        return ModelList(
            data=page,
            has_more=len(page) < len(infos),
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )

    @get("/{model_id:path}")
    async def get_model(
        self, request: KeyRequest, model_id: FromPath[str], services: NamedDependency[Services]
    ) -> ModelInfo | openai.Model | gemini.Model:
        make = _WRITERS[dialect_of(request.scope)]
        return make(services.find_model(str(model_id).lstrip("/")), services)


class GeminiModelsController(ModelsController):
    path = "/v1beta/models"

    @get()
    async def list_models(
        self, request: KeyRequest, services: NamedDependency[Services]
    ) -> gemini.ModelList:
        return _gemini_models(request, services)


def _gemini_models(request: KeyRequest, services: Services) -> gemini.ModelList:
    """All models on one page: there is no token of another one."""
    if request.query_params.get("pageToken"):
        raise InvalidRequest("pageToken: must be the nextPageToken of an answer")
    models = services.catalogue.models(services.fleet.served)
    return gemini.ModelList(models=[_gemini_model(model, services) for model in models])


def _gemini_model(model: CatalogueModel, services: Services) -> gemini.Model:
    longest = _longest_context(model, services)
    return gemini.Model(
        name=f"models/{model.id}",
        base_model_id=services.catalogue.base_of(model),
        display_name=_display_name(model),
        input_token_limit=longest or UNSET,
        output_token_limit=longest or UNSET,
    )


def _position(ids: list[str], model_id: str, field: str) -> int:
    if model_id not in ids:
        raise InvalidRequest(f"{field}: no such model")
    return ids.index(model_id)


def _info(model: CatalogueModel, services: Services) -> ModelInfo:
    longest = _longest_context(model, services)
    return ModelInfo(
        id=model.id,
        display_name=_display_name(model),
        created_at=_UNKNOWN_DATE,
        max_input_tokens=longest,
        max_tokens=longest,
    )


def _openai_model(model: CatalogueModel, services: Services) -> openai.Model:
    longest = _longest_context(model, services)
    if model.adapter is None:
        root = model.stands_for or UNSET
        return openai.Model(id=model.id, max_model_len=longest, root=root)
    parent = services.catalogue.base_of(model)
    return openai.Model(id=model.id, max_model_len=longest, root=model.adapter, parent=parent)


def _display_name(model: CatalogueModel) -> str:
    """An alias says so where a dialect has no field for it."""
    if not model.stands_for:
        return model.display_name
    return f"{model.display_name} (alias of {model.stands_for})"


def _longest_context(model: CatalogueModel, services: Services) -> int | None:
    contexts = [
        engine.description.max_context_tokens
        for engine in services.fleet.engines
        if engine.description and model.is_served_by(engine.description.model)
    ]
    return max(contexts, default=None)


_WRITERS: Mapping[
    Dialect, Callable[[CatalogueModel, Services], ModelInfo | openai.Model | gemini.Model]
] = {
    "anthropic": _info,
    "openai": _openai_model,
    "gemini": _gemini_model,
}
