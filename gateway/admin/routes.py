"""The controllers of the HTTP API."""

from gateway.admin import access, advice, conditions, engines, export, openapi, plan, usage
from gateway.http import (
    batches,
    cached_contents,
    conversations,
    health,
    model_calls,
    models,
    responses,
)

CONTROLLERS = (
    model_calls.MessagesController,
    batches.BatchesController,
    model_calls.ChatCompletionsController,
    model_calls.CompletionsController,
    responses.ResponsesController,
    conversations.ConversationsController,
    models.ModelsController,
    models.GeminiModelsController,
    cached_contents.CachedContentsController,
    cached_contents.CachedContentsAtV1Controller,
    health.HealthController,
    advice.AdviseController,
    advice.AdviceSummaryController,
    plan.PlanController,
    usage.DivergenceController,
    usage.ConversationController,
    usage.ContentController,
    conditions.ConditionsController,
    engines.EnginesController,
    usage.LiveController,
    engines.LeasesController,
    engines.ModelIdsController,
    access.WorkspacesController,
    access.KeysController,
    usage.UsageController,
    usage.RefusalsController,
    usage.RefusalCountsController,
    export.ExportController,
    openapi.OpenApiController,
)
