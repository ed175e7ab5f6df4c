"""Requests that schemathesis makes from /openapi.json: none fails, and errors have our form."""

from __future__ import annotations

import engines
import hypothesis
import pytest
from served import served

schemathesis = pytest.importorskip("schemathesis")

NUM_EXAMPLES = 50  # for each of ten operations


@pytest.fixture(scope="module")
def schema():
    engine = engines.engine("text", "ngram", max_logprobs=3, max_queue=6)
    with served(engine, max_body_bytes=20_000, header_timeout_s=5.0) as (url, _):
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@schemathesis.pytest.from_fixture("schema").parametrize()
@hypothesis.settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_no_request_fails(case):
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
