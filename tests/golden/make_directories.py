"""Writes `directories/`: a model, heads and FlexDraft's weights, as version 0.1.0 saved them.

Run with the `jaxspec` of that version. `expected.npz` has the parameters, by directory and path.
"""

import pathlib
import sys

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import flex
import heads

import jaxspec

HERE = pathlib.Path(__file__).resolve().parent / "directories"


def leaves(params):
    """The parameters by their paths."""
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


if __name__ == "__main__":
    target = flex.target(kernels="xla", num_layers=1)
    config = flex.config_of(target, num_deep_layers=1)
    drafters = {
        "heads": heads.random_heads("medusa", target),
        "flexdraft": jaxspec.FlexDraft(config, flex.random_params(config)),
    }
    jaxspec.save_model(target, HERE / "model")
    expected = {"model": leaves(target.params)}
    for name, drafter in drafters.items():
        jaxspec.save_drafter(drafter, HERE / name, target=target)
        expected[name] = leaves(drafter.params)
    arrays = {
        f"{name}{path}": leaf for name, each in expected.items() for path, leaf in each.items()
    }
    np.savez(HERE / "expected.npz", **arrays)
