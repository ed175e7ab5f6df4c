"""Requests that schemathesis makes from /openapi.json: none fails, and errors have our form."""

from __future__ import annotations

import engines
import hypothesis
import pytest
from served import served

schemathesis = pytest.importorskip("schemathesis")

# Examples for each operation with a body or a parameter, of which there are five.
NUM_EXAMPLES = [40, pytest.param(400, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


def check(case):
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("number", NUM_EXAMPLES)
def test_no_request_fails(number):
    engine = engines.engine("text", "ngram", max_logprobs=3)
    settings = hypothesis.settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    with served(engine, max_body_bytes=20_000, header_timeout_s=5.0) as (url, _):
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        assert len(operations) == 11
        for operation in operations:
            settings(hypothesis.given(operation.as_strategy())(check))()
