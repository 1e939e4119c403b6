"""The controllers of the HTTP API."""

from gateway.admin.access import KeysController, WorkspacesController
from gateway.admin.advice import AdviceSummaryController, AdviseController, PlanController
from gateway.admin.engines import EnginesController, LeasesController
from gateway.admin.openapi import OpenApiController
from gateway.admin.report import ReportController
from gateway.admin.usage import (
    DivergenceController,
    LiveController,
    RefusalsController,
    UsageController,
)
from gateway.http.batches import BatchesController
from gateway.http.cached_contents import (
    CachedContentsAtV1Controller,
    CachedContentsController,
)
from gateway.http.health import HealthController
from gateway.http.model_calls import (
    ChatCompletionsController,
    CompletionsController,
    MessagesController,
    ResponsesController,
)
from gateway.http.models import GeminiModelsController, ModelsController

CONTROLLERS = (
    MessagesController,
    BatchesController,
    ChatCompletionsController,
    CompletionsController,
    ResponsesController,
    ModelsController,
    GeminiModelsController,
    CachedContentsController,
    CachedContentsAtV1Controller,
    HealthController,
    AdviseController,
    AdviceSummaryController,
    PlanController,
    DivergenceController,
    EnginesController,
    LiveController,
    LeasesController,
    WorkspacesController,
    KeysController,
    UsageController,
    RefusalsController,
    ReportController,
    OpenApiController,
)
