"""A conversion's own memory stays under its largest shard plus 1 GiB, whatever the model's size."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

# Samples the anonymous resident memory (Linux) while it converts; mapped pages are not in it.
_CHILD = """
import json, sys, threading, time
peak = 0
def watch():
    global peak
    while True:
        with open("/proc/self/status") as status:
            anonymous = next(line for line in status if line.startswith("RssAnon"))
        peak = max(peak, int(anonymous.split()[1]))
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
from jaxspec.convert import convert
summary = convert(sys.argv[1], sys.argv[2])
print(json.dumps({"peak_bytes": peak * 1024, "duration_s": summary.duration_s}))
"""


def write_large(directory: Path, *, num_layers: int, layers_per_shard: int, width: int) -> int:
    """Writes a Llama checkpoint of random bits, shard by shard; returns its bytes."""
    from safetensors.numpy import save_file

    inner, vocab_size = 4 * width, 16 * width
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": width // 128,
        "num_key_value_heads": width // 128,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    bits = np.random.default_rng(0).integers(0, 2**14, 2**24 + 2**12, dtype=np.uint16)

    def tensor(*shape):
        nonlocal start
        start = (start * 5 + 1) % 2**12
        return np.resize(bits[start:], shape).view(ml_dtypes.bfloat16)

    def layer_tensors(layer):
        name = f"model.layers.{layer}."
        return {
            f"{name}input_layernorm.weight": tensor(width),
            f"{name}post_attention_layernorm.weight": tensor(width),
            **{f"{name}self_attn.{key}_proj.weight": tensor(width, width) for key in "qkvo"},
            **{f"{name}mlp.{key}_proj.weight": tensor(inner, width) for key in ("gate", "up")},
            f"{name}mlp.down_proj.weight": tensor(width, inner),
        }

    start, index = 0, {}
    for shard, first in enumerate(range(-layers_per_shard, num_layers, layers_per_shard)):
        tensors = {}
        if first < 0:
            tensors["model.embed_tokens.weight"] = tensor(vocab_size, width)
            tensors["lm_head.weight"] = tensor(vocab_size, width)
            tensors["model.norm.weight"] = tensor(width)
        for layer in range(max(first, 0), first + layers_per_shard):
            tensors |= layer_tensors(layer)
        save_file(tensors, directory / f"model-{shard:05d}.safetensors")
        index |= dict.fromkeys(tensors, f"model-{shard:05d}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def convert_and_measure(source: Path, destination: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(source), str(destination)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(done.stdout.splitlines()[-1])


def read_leaf(directory: Path, *path: str, shape: tuple[int, ...]) -> np.ndarray:
    import jax
    import orbax.checkpoint.experimental.v1 as ocp

    wanted = jax.ShapeDtypeStruct(
        shape, ml_dtypes.bfloat16, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    for key in reversed(path):
        wanted = {key: wanted}
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with context:
        found = ocp.load(str(directory / "params"), wanted)
    for key in path:
        found = found[key]
    return np.asarray(found).view(np.uint16)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_four_gib_in_nine_shards(tmp_path):
    from safetensors import safe_open

    if shutil.disk_usage(tmp_path).free < 12 * 2**30:
        pytest.skip("needs 12 GiB of disk")
    source, out, width = tmp_path / "hf", tmp_path / "out", 2048
    try:
        total = write_large(source, num_layers=32, layers_per_shard=4, width=width)
        shards = [file.stat().st_size for file in source.glob("*.safetensors")]
        assert total >= 4 * 2**30
        assert len(shards) >= 8
        assert max(shards) < 0.6 * 2**30  # the limit means something: the model is much larger
        measured = convert_and_measure(source, out)
        print(
            f"{total / 2**30:.2f} GiB in {len(shards)} shards of up to "
            f"{max(shards) / 2**20:.0f} MiB: {measured['duration_s']:.1f} s, "
            f"peak anonymous {measured['peak_bytes'] / 2**20:.0f} MiB"
        )
        assert measured["peak_bytes"] < max(shards) + 2**30

        down = read_leaf(out, "layers", "17", "down", shape=(4 * width, width))
        index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        name = "model.layers.17.mlp.down_proj.weight"
        with safe_open(source / index[name], framework="numpy") as file:
            np.testing.assert_array_equal(down, file.get_tensor(name).view(np.uint16).T)
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
