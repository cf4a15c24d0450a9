"""What all tests share: hypothesis without time limits, because a busy machine is not a fault of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("llm42", deadline=None, print_blob=True)
settings.load_profile("llm42")
