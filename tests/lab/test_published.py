"""The published systems' behaviours: outputs stay, rounds and drafts are those of their code."""

import jax.numpy as jnp
import pytest
import toy

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.lab.studies import published
from jaxspec.lab.studies.replay import list_scheduling
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.schedulers import Pool
from jaxspec.types import Draft, chain_parents

SHAPE = {"batch_size": 2, "max_length": 128}


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


def test_full_acceptance_loses_the_bonus_and_nothing_else_changes(monkeypatch):
    chosen = jnp.asarray([[7, 8, 9, 4], [7, 8, 1, 4], [7, 8, 9, 4], [5, 8, 9, 4]], jnp.int32)
    monkeypatch.setattr("jaxspec.verifiers.coupled.choose", lambda logits, rows, prefix: chosen)
    draft = Draft(
        tokens=jnp.asarray([[7, 8, 9]] * 4, jnp.int32),
        parents=chain_parents(4, 3),
        num_valid=jnp.asarray([3, 3, 2, 0], jnp.int32),
    )
    verdict = published.WithoutBonus().verify(None, draft, None, None)
    assert verdict.num_accepted.tolist() == [2, 2, 1, 0]
    assert verdict.next_token.tolist() == [9, 1, 8, 5]
    assert verdict.path.tolist() == [[0, 1, -1], [0, 1, -1], [0, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("draft_length", [1, 5])
def test_a_round_emits_at_most_what_it_drafted(target, draft_length):
    # The target drafts for itself, so everything is accepted: 32 tokens in 32 / k rounds.
    prompts, asked = toy.prompts((9, 4)), SamplingParams(max_tokens=32)
    engine = Engine(
        target,
        published.PublishedDraftModel(target),
        verifier=published.WithoutBonus(),
        draft_length=draft_length,
        **SHAPE,
    )
    found = engine.generate(prompts, asked)
    with_bonus = Engine(target, DraftModel(target), draft_length=draft_length, **SHAPE)
    best = with_bonus.generate(prompts, asked)
    assert [c.token_ids for c in found] == [c.token_ids for c in best]
    for completion, other in zip(found, best, strict=True):
        assert completion.acceptance.num_rounds == -(-32 // draft_length)
        assert other.acceptance.num_rounds == -(-32 // (draft_length + 1))
        if draft_length == 1:
            assert completion.acceptance.num_accepted_tokens == 0


def test_rounds_drafts_and_reading_are_those_of_a_simulation(target):
    prompts, limits, k = toy.prompts((9, 4)), (7, 20), 5
    engine = Engine(target, **published.eqspec(target), draft_length=k, **SHAPE)
    found = engine.generate(prompts, [SamplingParams(max_tokens=n) for n in limits])
    plain = Engine(target, **SHAPE).generate(
        prompts, [SamplingParams(max_tokens=n) for n in limits]
    )
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]

    # Everything is accepted, so a round emits what it drafts: 5, 2 (the first row's last), 5, 5, 3.
    length, remaining = [9, 4], list(limits)
    rounds = drafted = read = 0
    while any(remaining):
        running = [row for row in range(2) if remaining[row]]
        shared = min(k, *(remaining[row] for row in running))
        read += len(running) * (max(length[row] for row in running) - 1 + shared)
        rounds, drafted = rounds + 1, drafted + shared * len(running)
        for row in running:
            length[row] += shared
            remaining[row] -= shared
    assert rounds == int(engine.state.num_rounds) == 5
    assert drafted == sum(c.acceptance.num_draft_tokens for c in found) == 7 + 20
    assert read == int(engine.state.drafter.num_positions)
    # EXSPEC takes its rows from a pool.
    settings = published.exspec(target, window_size=7)
    assert (settings["layout"], settings["scheduler"]) == ("aligned", Pool(window_size=7))


def test_a_draft_cache_reads_what_is_drafted_and_committed(target):
    prompts, asked = toy.prompts((60, 40)), SamplingParams(max_tokens=40)
    draft = toy.model(num_layers=1, seed=1)
    read = {}
    for name, settings in (("kept", {"drafter": DraftModel(draft)}), ("reread", None)):
        settings = published.eqspec(draft) if settings is None else settings
        engine = Engine(target, **settings, draft_length=4, **SHAPE)
        found = engine.generate(prompts, asked)
        read[name] = int(engine.state.drafter.num_positions)
        drafted = sum(c.acceptance.num_draft_tokens for c in found)
        if name == "kept":
            committed = sum(len(c.prompt_token_ids) for c in found)
            # Prompts, and each draft step; rows near their end wait for the others' last steps.
            assert committed + drafted - 2 <= read[name] <= 1.1 * (committed + drafted)
    assert read["reread"] > 4 * read["kept"]


def test_list_scheduling_of_a_drawn_example():
    # On two rows 3 and 1 begin; 2 follows 1, and 4 follows whichever ends first: both, at 3.
    assert list_scheduling([3, 1, 2, 4], 2) == 7
    assert list_scheduling([3, 1, 2, 4], 1) == 10


def test_broken_systems_are_broken_only_while_asked_for(target):
    """BSP and DSD ruin outputs; the same settings without their faults do not."""
    prompts, params = toy.prompts((9, 4, 12, 7)), SamplingParams(max_tokens=16, ignore_eos=True)
    plain = Engine(target, **SHAPE).generate(prompts, params)
    draft = toy.model(num_layers=1, seed=1)

    def num_equal():
        engine = Engine(target, DraftModel(draft), draft_length=3, **SHAPE)
        found = engine.generate(prompts, params)
        return sum(a.token_ids == b.token_ids for a, b in zip(found, plain, strict=True))

    for system in published.BROKEN:
        with published.as_broken(system):
            assert num_equal() < len(prompts), system
    assert num_equal() == len(prompts)
