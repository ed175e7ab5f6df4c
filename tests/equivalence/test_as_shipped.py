"""The promise in programs as users compile them, with all of XLA's optimisations.

The rest of this folder compiles with few of them, to be quick; see tests/conftest.py.
"""

import pytest
from test_equivalence import NATIVE, XLA, Setting, check_tokens_and_kv

pytestmark = pytest.mark.as_shipped


@pytest.fixture(scope="module", params=[NATIVE, "float32, xla", XLA])
def setting(request):
    return Setting.of(request.param)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        (NATIVE, "DraftModel"),
        (NATIVE, "a tree"),
        ("float32, xla", "DraftModel"),
        pytest.param(
            "float32, xla", "DraftModel of the target, a beam tree", marks=pytest.mark.slow
        ),
        (XLA, "DraftModel"),
        (XLA, "Oracle"),
    ],
    indirect=["setting"],
)
def test_tokens_and_kv_are_plain_decodings(setting, name):
    check_tokens_and_kv(setting, name)
