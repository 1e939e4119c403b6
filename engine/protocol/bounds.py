"""The bounds of a request, and the types of counts."""

from typing import Annotated

from msgspec import Meta

MAX_NAMES = 512
MAX_BREAKPOINTS = 4
MAX_DOCUMENTS = 64
MAX_CELLS = 2048
MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
MAX_ALLOWED_TOKENS = 1024
MAX_PENALTY = 100.0
MAX_RECORD_BYTES = 4096
MAX_IMAGES = 100
MAX_IMAGE_PIXELS = 4096 * 4096
MAX_PROMPT_PIXELS = 6 * MAX_IMAGE_PIXELS
"""The most pixels of a prompt's images together. A decoded pixel has three bytes."""

NotNegative = Annotated[int, Meta(ge=0)]
