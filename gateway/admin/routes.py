"""The controllers of the HTTP API."""

from gateway.admin.access import KeysController, WorkspacesController
from gateway.admin.advice_summary import AdviceSummaryController
from gateway.admin.advise import AdviseController
from gateway.admin.divergence import DivergenceController
from gateway.admin.engines import EnginesController
from gateway.admin.leases import LeasesController
from gateway.admin.live import LiveController
from gateway.admin.openapi.controller import OpenApiController
from gateway.admin.plan import PlanController
from gateway.admin.refusals import RefusalsController
from gateway.admin.report import ReportController
from gateway.admin.usage import UsageController
from gateway.http.batches import BatchesController
from gateway.http.cached_contents import (
    CachedContentsAtV1Controller,
    CachedContentsController,
)
from gateway.http.completions import ChatCompletionsController, CompletionsController
from gateway.http.health import HealthController
from gateway.http.messages import MessagesController
from gateway.http.models import GeminiModelsController, ModelsController
from gateway.http.responses import ResponsesController

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
