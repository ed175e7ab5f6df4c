"""The promise in programs as users compile them, with all of XLA's optimisations.

The rest of this folder compiles with few of them, to be quick; see tests/conftest.py.
"""

import numpy as np
import pytest
import test_sampled
import toy
from live import live_kv, poison
from test_sampled import PARAMS, token_ids

pytestmark = pytest.mark.as_shipped


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "DraftModel"),
        ("float32", "a tree"),
        ("float32", "a beam tree"),
        ("bfloat16", "DraftModel"),
        ("bfloat16", "Oracle"),
    ],
)
def test_tokens_and_kv_are_plain_decodings(dtype, name):
    setting = test_sampled.make_setting(dtype)
    drafter = test_sampled.drafter_named(name, setting.target, toy.sequences(setting.witness))
    engine = test_sampled.engine_for(setting.target, drafter)
    plain = engine.generate(setting.prompts, PARAMS, speculate=False)
    plain_kv = live_kv(engine)
    poison(engine)
    drafted = engine.generate(setting.prompts, PARAMS)
    assert token_ids(drafted) == token_ids(plain)
    for ours, theirs in zip(live_kv(engine), plain_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if name != "DraftModel":
        assert test_sampled.num_accepted(drafted) > 0
