"""Whether outputs differ from a reference at ties within rounding, and nowhere else."""

from __future__ import annotations

from jaxspec.audit.judge import Divergence, judge_all


def divergences(target, completions, references, params, *, scorer=None) -> list[Divergence]:
    """The first divergence of each completion from its reference; every one is shown to be a
    tie."""
    for ours, theirs in zip(completions, references, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
    expected = [theirs.token_ids for theirs in references]
    found = judge_all(scorer or target, completions, expected, params)
    assert found.are_ties, found.describe()
    return list(found.judged.values())
