"""Run by `test_two_devices.py` on two devices: prompts read on one, decoded on the other."""

import dataclasses

import jax
import numpy as np

import jaxspec
from jaxspec.serving import ServingEngine

CONFIG = jaxspec.ModelConfig(
    family="llama",
    vocab_size=32,
    width=16,
    feed_forward_width=16,
    num_layers=1,
    num_query_heads=2,
    num_kv_heads=1,
    head_size=8,
    max_length=64,
    norm_epsilon=1e-6,
    rope=jaxspec.RopeConfig(theta=1e4, rotary_size=8),
)

first, second = jax.devices()
model = jaxspec.random_model(CONFIG)


def engine_on(device):
    """A serving engine whose parameters are on `device`."""
    target = dataclasses.replace(model, params=jax.device_put(model.params, device))
    return ServingEngine(
        target, jaxspec.DraftModel(target), batch_size=2, max_length=128, draft_length=2
    )


reader, decoder = engine_on(second), engine_on(first)
outputs = []
for engine in (reader, decoder):
    state = decoder.init_decode_state()
    prefilled = engine.prefill([1, 2, 3], jaxspec.SamplingParams(max_tokens=9, ignore_eos=True))
    where = {d for leaf in jax.tree.leaves(prefilled.cache) for d in leaf.devices()}
    assert where == {second if engine is reader else first}, where
    state = decoder.insert(prefilled, state, 1)
    output: list[int] = []
    while len(output) < 9:
        state, result = decoder.generate(state)
        output += np.asarray(result.tokens[1, : result.num_new[1]]).tolist()
    assert state.tokens.devices() == {first}
    outputs.append(output)
assert outputs[0] == outputs[1], outputs
assert [decoder.programs[name].num_compilations() for name in ("insert", "generate")] == [1, 1]
print("equal", len(outputs[0]))
