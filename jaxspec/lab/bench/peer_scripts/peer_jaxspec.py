"""jaxspec, as a peer of the others: plain, n-grams, or a drafter's directory."""

import jax
from protocol import answer, settings

import jaxspec

target = jaxspec.load_model(settings["model"], dtype=settings["dtype"])
drafter = None if settings["drafter"] == "none" else settings["drafter"]
engine = jaxspec.Engine(
    target,
    drafter,
    batch_size=settings["batch_size"],
    max_length=settings["max_length"],
    **({} if drafter is None else {"draft_length": settings["draft_length"]}),
)


def generate(prompts, max_tokens):
    """See `protocol.answer`."""
    params = jaxspec.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [list(done.token_ids) for done in engine.generate(prompts, params)]


versions = {"jaxspec": jaxspec.__version__, "jax": jax.__version__}
kernels = engine.describe()["kernels"]
answer({"versions": versions, "arithmetic": f"{settings['dtype']}, kernels {kernels}"}, generate)
