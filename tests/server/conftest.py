"""What the tests of the server share: a server and a client for it, and the same engine without a server."""

from __future__ import annotations

import pytest

from llm42 import LLM
from served import SMALL, run_server
from tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The directory of a tiny Llama with a chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def offline(model):
    """The same engine without a server: what it generates is what a server must answer."""
    with LLM(model, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="session")
def shared_server(model):
    with run_server(model) as server:
        yield server


@pytest.fixture
def server(shared_server):
    """The shared server, which each test must leave clean."""
    yield shared_server
    shared_server.assert_clean()


@pytest.fixture(scope="session")
def shared_client(shared_server):
    with shared_server.client() as client:
        yield client


@pytest.fixture
def client(server, shared_client):
    """A client of the shared server, which each test must leave clean."""
    del server
    return shared_client
