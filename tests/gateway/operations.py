"""Every operation of the HTTP API, as the application declares it."""

from pathlib import Path

from gateway.admin.openapi import describe, operations_of
from gateway.app import create_app
from tests.gateway.serving import make_settings

# An application that is not started opens no file.
APPLICATION = create_app(make_settings(Path("unused"), "http://127.0.0.1:9"))
OPERATIONS = operations_of(APPLICATION)
DOCUMENT = describe(OPERATIONS)
