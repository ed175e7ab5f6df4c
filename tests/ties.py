"""Whether outputs part from a witness at ties within rounding, and nowhere else."""

from __future__ import annotations

from jaxspec.audit.judge import Divergence, Finding, judge
from jaxspec.audit.scoring import Scorer


def divergences(target, completions, witness, params, *, scorer=None) -> list[Divergence]:
    """The first divergence of each completion from its witness; every one is shown to be a tie."""
    found = []
    for ours, theirs in zip(completions, witness, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        if ours.token_ids == theirs.token_ids:
            continue
        if scorer is None:
            longest = max(len(c.prompt_token_ids + c.token_ids) for c in completions)
            scorer = Scorer(target, max_length=longest)
        divergence = judge(
            scorer,
            prompt_ids=ours.prompt_token_ids,
            output_ids=ours.token_ids,
            reference_ids=theirs.token_ids,
            params=params,
        )
        assert divergence is not None
        assert divergence.finding == Finding.TIE, (ours.request_id, divergence)
        found.append(divergence)
    return found
