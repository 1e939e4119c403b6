"""The page Why did this miss."""

from dashboard import parts

parts.title("Why did this miss", "Where did this prompt stop being the one before it?")
