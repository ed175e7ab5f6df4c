"""A FlexDraft drafter whose calibrator adds nothing, to measure what calibration gains.

python docs/recipes/uncalibrated.py MODEL RUN/flexdraft OUT
"""

import sys

import jax
import jax.numpy as jnp

from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.kernels.base import unpacked
from jaxspec.load.drafters import make_drafter, save_drafter
from jaxspec.load.models import load_model


def main(model: str, flexdraft: str, out: str):
    """Writes it."""
    target = load_model(model)
    drafter = make_drafter(f"flexdraft:{flexdraft}", target)
    params = unpacked(drafter.params)
    params = params | {"calibrator": jax.tree.map(jnp.zeros_like, params["calibrator"])}
    save_drafter(FlexDraft(drafter.config, params), out, target=target)


if __name__ == "__main__":
    main(*sys.argv[1:])
