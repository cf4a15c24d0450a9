"""The OpenAPI schema: it is one, it tells what the server does, and what it allows is answered without a 500."""

from __future__ import annotations

import warnings

import httpx2 as httpx
import pytest
from hypothesis import HealthCheck, given, settings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies
    schemathesis = pytest.importorskip("schemathesis")

from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{name}"),
]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


def test_the_schema_documents_every_error_a_completion_may_have(server):
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert document["openapi"].startswith("3.")
    for _, path in OPERATIONS[:2]:
        responses = document["paths"][path]["post"]["responses"]
        assert set(responses) == {*["200", "400", "401", "404", "408", "413", "429", "500", "503", "504"], "default"}
        assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert not [path for path, methods in document["paths"].items() if "422" in str(methods)]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_what_the_schema_allows_is_answered_as_it_says(server, method, path):
    operation = schemathesis.openapi.from_url(f"{server.url}/openapi.json")[path][method]

    @given(case=operation.as_strategy())
    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case):
        case.call_and_validate(checks=CHECKS, timeout=30)

    check()
