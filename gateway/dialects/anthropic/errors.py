"""Failures as errors of the Messages API."""

import re

from gateway.base.errors import DemandRefused, GatewayError, ThreadNotFound
from gateway.dialects.anthropic.response import ErrorDetail, ErrorDetails

_TOOL = re.compile(r"^tools\[(\d+)\]\.")
_SCHEMA = re.compile(r"^output_schema\b")


def detail_of(failure: GatewayError) -> ErrorDetail:
    message = str(failure)
    if isinstance(failure, DemandRefused):
        message = _TOOL.sub(r"tools.\1.", message)
        message = _SCHEMA.sub("output_config.format.schema", message)
    if isinstance(failure, ThreadNotFound):
        return ErrorDetail(failure.type, message, ErrorDetails(failure.code))
    return ErrorDetail(failure.type, message)
