"""Medusa's heads against the logits that its release's own code computed; see `make_medusa`."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import toy
from safetensors.numpy import save_file

from jaxspec.drafters.heads import formulas
from jaxspec.drafters.heads.formulas import TargetParts
from jaxspec.load.drafters import load_drafter

FILE = Path(__file__).parent / "heads" / "medusa.npz"
TOLERANCE = 1e-4
TARGET = toy.model(family="llama", has_qk_norm=False)
UNUSED = TargetParts(*(lambda _: pytest.fail("not of a head's own"),) * 3)


def golden(num_layers: int) -> dict[str, np.ndarray]:
    """The arrays of heads of so many blocks, by name."""
    prefix = f"{num_layers}/"
    with np.load(FILE) as arrays:
        names = [name for name in arrays if name.startswith(prefix)]
        return {name.removeprefix(prefix): arrays[name] for name in names}


def largest_difference(directory: Path, arrays: dict[str, np.ndarray]) -> float:
    """Between our logits of the stored hidden states and theirs."""
    tensors = {
        name.removeprefix("tensor/"): array.astype(np.float32)
        for name, array in arrays.items()
        if name.startswith("tensor/")
    }
    directory.mkdir()
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    heads = load_drafter(directory, TARGET)
    hidden, differences = jnp.asarray(arrays["hidden"]), []
    no_tokens = jnp.zeros((len(hidden), 1), jnp.int32)
    assert len(arrays["logits"]) == heads.config.num_heads == 3
    for index, expected in enumerate(arrays["logits"]):
        settings = heads.config, heads.params, UNUSED, index
        output = formulas.apply_head(*settings, hidden, no_tokens)[1]
        differences.append(np.abs(formulas.head_logits(*settings, output) - expected).max())
    return float(max(differences))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_medusa_computes_what_its_release_does(tmp_path, num_layers):
    assert largest_difference(tmp_path / "heads", golden(num_layers)) <= TOLERANCE


def test_where_the_arrays_come_from_is_stored():
    with np.load(FILE) as arrays:
        assert str(arrays["repository"]) == "https://github.com/FasterDecoding/Medusa"
        assert len(str(arrays["commit"])) == 40
    assert FILE.stat().st_size < 100_000


def test_heads_that_change_places_are_seen(tmp_path):
    arrays = golden(1)
    first, second = (f"tensor/{head}.0.linear.weight" for head in range(2))
    swapped = {**arrays, first: arrays[second], second: arrays[first]}
    assert largest_difference(tmp_path / "heads", swapped) > 100 * TOLERANCE
