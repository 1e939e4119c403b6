"""GET /v1/models and GET /v1/models/{id}, for both SDKs.

Clients with Anthropic's version header get Anthropic's shape. All others get OpenAI's.
"""

from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from gateway.base.catalogue import Model
from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.response import ModelInfo, ModelList
from gateway.dialects.openai import models as openai
from gateway.http.auth import KeyAuth
from gateway.http.errors import speaks_openai
from gateway.http.generation import KeyRequest
from gateway.http.query import check_query
from gateway.http.services import Services

# An own model's release date is not known. The API allows the epoch for that.
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"


class ModelsController(Controller):
    path = "/v1/models"
    middleware = (KeyAuth,)
    before_request = staticmethod(check_query)

    @get()
    async def list_models(
        self,
        request: KeyRequest,
        services: NamedDependency[Services],
        after_id: Annotated[str | None, QueryParameter(name="after_id")] = None,
        before_id: Annotated[str | None, QueryParameter(name="before_id")] = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 20,
    ) -> ModelList | openai.ModelList:
        if speaks_openai(request.scope):
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
        page = infos[-limit:] if before_id is not None and after_id is None else infos[:limit]
        return ModelList(
            data=page,
            has_more=len(page) < len(infos),
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
        )

    @get("/{model_id:path}")
    async def get_model(
        self, request: KeyRequest, model_id: FromPath[str], services: NamedDependency[Services]
    ) -> ModelInfo | openai.Model:
        model = services.find_model(str(model_id).lstrip("/"))
        if speaks_openai(request.scope):
            return _openai_model(model, services)
        return _info(model, services)


def _position(ids: list[str], wanted: str, field: str) -> int:
    if wanted not in ids:
        raise InvalidRequest(f"{field}: no such model")
    return ids.index(wanted)


def _info(model: Model, services: Services) -> ModelInfo:
    longest = _longest_context(model, services)
    return ModelInfo(
        id=model.id,
        display_name=model.display_name,
        created_at=_UNKNOWN_DATE,
        max_input_tokens=longest,
        max_tokens=longest,
    )


def _openai_model(model: Model, services: Services) -> openai.Model:
    return openai.Model(id=model.id, max_model_len=_longest_context(model, services))


def _longest_context(model: Model, services: Services) -> int | None:
    contexts = [
        engine.description.max_context_tokens
        for engine in services.fleet.engines
        if engine.description and model.is_served_by(engine.description.model)
    ]
    return max(contexts, default=None)
