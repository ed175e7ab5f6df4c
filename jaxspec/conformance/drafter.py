"""The battery for drafters."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jaxspec import sampling
from jaxspec.cache import pages as kv
from jaxspec.conformance.checks import (
    CHUNK,
    MAX_TOKENS,
    ROWS,
    WINDOW,
    demand,
    demand_compiled_once,
    demand_methods,
    demand_name_and_params,
    demand_nothing_closed_over,
    demand_same_output,
    demand_same_tree,
    distance_of,
    mixed_params,
    rounding_of,
)
from jaxspec.conformance.report import (
    Check,
    ConformanceReport,
    NotApplicable,
    Untested,
    chosen_checks,
    enters,
    run_checks,
)
from jaxspec.conformance.under_test import NUM_ROUNDS, DrafterUnderTest
from jaxspec.decode import round as decode_round
from jaxspec.decode.loop import one_round
from jaxspec.drafters.base import Drafter, function_params
from jaxspec.errors import SettingError
from jaxspec.models.base import Model
from jaxspec.runtime.kinds import kind_of
from jaxspec.types import DecodeState, Draft

ALPHA = 1e-6  # probability that a healthy part fails one test of a distribution
SHARES = " (if its drafts may depend on other requests, it has to say shares_state = True)"
NUM_DRAWS = 200  # drafts per row that a distribution is tested with
DRAWN = (  # sampling parameters of each row for that test
    {"temperature": 0.7, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 1.0, "top_k": 20},
)

DRAFTER_CHECKS: dict[str, Check] = {}


def check_drafter(
    drafter: Drafter,
    target: Model,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    max_length: int = 256,
    seed: int = 0,
) -> ConformanceReport:
    """Checks that a drafter keeps the contracts of decoding, and draws from the distribution that
    it states.

    A drafter cannot make the output wrong while the loop is right. But it can make a request depend
    on its neighbours, keep state that it should forget, or state a distribution that it did not
    draw from, which biases sampled output.

    If nothing was drafted, a check is `untested`, not passed, and the report is not ok: give
    prompts on which it drafts. A drafter with `shares_state = True` declares that its drafts may
    depend on other requests, earlier ones or neighbours. It has its own contract: shared state has
    no row axis, a fresh state makes it draft the same again, and no output depends on it.

    Args:
      drafter: an instance of a subclass of `Drafter`.
      target: the model that it drafts for.
      prompts: six or more token lists of different lengths for which it should draft something;
        default `battery_prompts`.
      only: names of checks to run; default all of `DRAFTER_CHECKS`.
      skip: names of checks to leave out.
      max_length: slots per row, a multiple of 128.
      seed: seed of the requests and draws.

    Raises:
      SettingError: there is no such check, or the prompts are too few or too long.
    """
    chosen = chosen_checks(DRAFTER_CHECKS, only, skip)
    max_length = kv.round_up_to_block(max_length)
    prompts = battery_prompts(target.vocab_size, seed=seed) if prompts is None else prompts
    longest = max_length - MAX_TOKENS - WINDOW
    if len(prompts) < 2 * ROWS or not all(0 < len(prompt) <= longest for prompt in prompts):
        raise SettingError(
            f"{len(prompts)} prompts were given to check a drafter with; give at least {2 * ROWS} "
            f"of 1 to {longest} tokens each."
        )
    for_target = getattr(drafter, "for_target", None)
    drafter = drafter if for_target is None else for_target(target)
    prepared = DrafterUnderTest(
        drafter=drafter, target=target, prompts=prompts, max_length=max_length, seed=seed
    )
    return run_checks("drafter", drafter, chosen, prepared)


def battery_prompts(vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Six prompts of random tokens, each a repeated phrase, so that a lookup drafter finds the last
    tokens of every prompt except the shortest earlier in that prompt."""
    rng = np.random.default_rng(seed)
    prompts = []
    for length in (13, 37, 21, 60, 2, 33):
        phrase = rng.integers(0, vocab_size, 4)
        prompts.append(np.resize(phrase, length).tolist())
    return prompts


def _is_valid(draft: Draft) -> np.ndarray:
    """`[B, N]` bool, which nodes are neither padding nor holes."""
    return np.asarray(draft.is_node)


def _differs(a: Draft, c: Draft, row_of_a: int, row_of_c: int) -> str | None:
    """The difference between the drafts of two rows, ignoring padding."""
    num_a, num_c = int(a.num_valid[row_of_a]), int(c.num_valid[row_of_c])
    if num_a != num_c:
        return f"{num_a} nodes, not {num_c}"
    for name in ("tokens", "parents"):
        mine, theirs = getattr(a, name)[row_of_a, :num_a], getattr(c, name)[row_of_c, :num_a]
        if not np.array_equal(mine, theirs):
            return f"{name} {mine.tolist()}, not {theirs.tolist()}"
    return None


def _demand_same(
    found: Draft,
    expected: Draft,
    where: str,
    places: Mapping[int, int] | None = None,
    hint: str = "",
) -> None:
    """Demands that rows got the expected drafts; `places` gives the row of each in `expected`."""
    for row, place in (places or {row: row for row in range(ROWS)}).items():
        difference = _differs(found, expected, row, place)
        demand(not difference, f"{where}, row {row} was drafted {difference}{hint}")


@enters(DRAFTER_CHECKS, "C6", "attributes and methods of the Drafter protocol")
def _protocol(b: DrafterUnderTest) -> str:
    drafter = b.drafter
    demand_name_and_params(drafter, " (an empty tuple will do)")
    demand_methods(drafter, "check", "init", "admit", "lag", "catch_up", "propose", "commit")
    for flag, default in (("is_chain", None), ("is_synthetic", None), ("shares_state", False)):
        value = getattr(drafter, flag, default)
        demand(isinstance(value, bool), f"{flag} is {value!r}, not True or False")
    drafter.check(b.target)
    return f"{len(jax.tree.leaves(drafter.params))} parameter arrays"


@enters(DRAFTER_CHECKS, "C2", "its state keeps structure, shapes and dtypes in every function")
def _static_shapes(b: DrafterUnderTest) -> str:
    state, rows, chosen = b.places
    for name, row in chosen.items():
        function = functools.partial(getattr(b.drafter, name), b.shape)
        after = jax.eval_shape(function, b.params, state, rows, row)
        demand_same_tree(state, after, f"after {name} the state")
    everything = b.engine.executor.params, b.engine.state
    _, after = jax.eval_shape(b.propose, *everything)
    demand_same_tree(state, after, "after propose the state")
    after = jax.eval_shape(functools.partial(one_round, b.parts), *everything).drafter
    demand_same_tree(state, after, "after commit the state")
    lag = jax.eval_shape(b.drafter.lag, state, rows)
    if lag is not None:
        demand(kind_of(lag) == f"int32[{ROWS}]", f"lag is {kind_of(lag)}, not int32[{ROWS}]")
    return f"{len(jax.tree.leaves(state))} arrays of state"


@enters(DRAFTER_CHECKS, "C6", "parameters are handed in, not closed over")
def _params(b: DrafterUnderTest) -> str:
    state, rows, chosen = b.places
    demand_nothing_closed_over(b.propose, b.engine.executor.params, b.engine.state)
    for name, row in chosen.items():
        function = functools.partial(getattr(b.drafter, name), b.shape)
        demand_nothing_closed_over(function, b.params, state, rows, row)
    return "no parameter, and nothing large, among the constants"


@enters(DRAFTER_CHECKS, "C5", "a draft is tokens, parents [B, N], num_valid [B], parents first")
def _draft_shape(b: DrafterUnderTest) -> str:
    num_drafted = 0
    kinds = {
        "tokens": f"int32{[ROWS, b.num_nodes]}",
        "parents": f"int32{[ROWS, b.num_nodes]}",
        "num_valid": f"int32{[ROWS]}",
        "q": f"float32{[ROWS, b.num_nodes, b.target.vocab_size]}",
    }
    for _, draft in b.history:
        found = {name: getattr(draft, name) for name in kinds if name != "q" or draft.q is not None}
        for name, array in found.items():
            kind, expected = kind_of(array), kinds[name]
            demand(kind == expected, f"{name} is {kind}, not {expected}")
        node = np.arange(b.num_nodes)
        is_invalid = ~_is_valid(draft)
        is_before = (draft.parents >= -1) & (draft.parents < node)
        demand((is_before | is_invalid).all(), "a node comes before its parent")
        is_next = (draft.parents == node - 1) | (not b.drafter.is_chain)
        demand((is_next | is_invalid).all(), "is_chain is True, and a draft is no chain")
        deepest = int(np.max(_depths(draft)[_is_valid(draft)], initial=0))
        most = b.parts.draft_depth
        demand(deepest <= most, f"a node has depth {deepest}, and max_depth is {most}")
        num_drafted += int(draft.num_valid.sum())
    _need_drafts(num_drafted)
    return f"{num_drafted} nodes in {NUM_ROUNDS} rounds of {ROWS} rows"


@enters(DRAFTER_CHECKS, "C5", "drafted tokens are of the target's vocabulary")
def _vocabulary(b: DrafterUnderTest) -> str:
    size, num_drafted = b.target.vocab_size, 0
    for _, draft in b.history:
        node = np.arange(draft.tokens.shape[1])
        drafted = draft.tokens[node < np.asarray(draft.num_valid)[:, None]]
        if not b.drafter.is_chain:
            drafted = drafted[drafted != -1]  # holes
        outside = drafted[(drafted < 0) | (drafted >= size)]
        demand(not outside.size, f"token {outside[:1]} was drafted, of a vocabulary of {size}")
        num_drafted += len(drafted)
    _need_drafts(num_drafted)
    return f"{num_drafted} tokens, V = {size}"


@enters(DRAFTER_CHECKS, "C5", "num_valid is at most draft_limit; a limit of 0 gets no draft")
def _draft_limit(b: DrafterUnderTest) -> str:
    state = b.fresh(b.requests(range(ROWS)))
    limits = [(0, 0, 0), (0, 1, b.num_nodes), (b.num_nodes, 0, 1), (1, b.num_nodes, 0), (2, 2, 2)]
    num_drafted = 0
    for limit in limits:
        num_valid = b.draft(_limited(state, limit)).num_valid
        num_drafted += int(num_valid.sum())
        for row, (most, number) in enumerate(zip(limit, num_valid.tolist(), strict=True)):
            message = f"row {row} has {number} nodes under a draft limit of {most}"
            demand(0 <= number <= most, message)
    _need_drafts(num_drafted)
    return f"limits from 0 to {b.num_nodes}, differing by row"


@enters(DRAFTER_CHECKS, "C6", "the same requests get the same drafts again")
def _determinism(b: DrafterUnderTest) -> str:
    pairs = zip(b.history, b.rounds(range(ROWS)), strict=True)
    for index, ((_, expected), (_, found)) in enumerate(pairs):
        _demand_same(found, expected, f"in round {index}")
    _need_drafts(b.num_drafted)
    return f"{NUM_ROUNDS} rounds, twice"


@enters(DRAFTER_CHECKS, "C4", "E2: a row's drafts do not depend on its neighbours or its row")
def _row_independence(b: DrafterUnderTest) -> str:
    _need_own_state(b)
    expected = [draft for _, draft in b.history]
    # The requests of rows 0 to 2 in other rows, among others.
    for numbers in ((1, ROWS, 0), (ROWS + 1, 2, ROWS + 2)):
        for index, (_, draft) in enumerate(b.rounds(numbers)):
            places = {row: number for row, number in enumerate(numbers) if number < ROWS}
            where = f"in round {index}, among other requests"
            _demand_same(draft, expected[index], where, places, SHARES)
    _need_drafts(b.num_drafted)
    return f"{ROWS} requests in other rows, among other neighbours"


@enters(DRAFTER_CHECKS, "C1", "no drift: after any verdict it drafts as if it had just caught up")
def _no_drift(b: DrafterUnderTest) -> str:
    if b.drafter.is_synthetic:
        raise NotApplicable("it is synthetic: it knows a request by its prompt")
    if b.complete.score is not None and not b.complete.uses_target_cache:
        raise NotApplicable("its drafts come from the round before, which a fresh row has not had")
    _need_own_state(b)
    wrong, compared, after, last = [], ROWS * len(b.history), set(), None
    for index, (state, draft) in enumerate(b.history):
        fresh = b.afresh(state)
        for row in range(ROWS):
            outcome = "the prompt"
            if last is not None:
                kept = int(state.num_committed[row] - last[0].num_committed[row]) - 1
                drafted = int(last[1].num_valid[row])
                outcome = f"{kept} of {drafted} drafts accepted"
                after.add((kept, drafted))
            if difference := _differs(draft, fresh, row, row):
                wrong.append(
                    f"after {outcome} (round {index}, row {row}) it drafted {difference} as a "
                    "drafter that has read the same tokens afresh"
                )
        last = state, draft
    # Below fp32 a cache written step by step differs by rounding from one written in chunks, and a
    # tie may flip.
    allowed = compared // 10 if b.is_rounded else 0
    demand(len(wrong) <= allowed, f"{len(wrong)} of {compared} drafts drifted: {wrong[:1]}")
    _need_drafts(b.num_drafted)
    full = any(kept == drafted > 0 for kept, drafted in after)
    none = any(kept == 0 < drafted for kept, drafted in after)
    return (
        f"{compared} drafts, {'with' if full else 'without'} full and "
        f"{'with' if none else 'without'} no acceptance among the verdicts before them"
    )


@enters(DRAFTER_CHECKS, "C1", "a new request in a used row finds nothing of its predecessor")
def _row_reuse(b: DrafterUnderTest) -> str:
    _need_own_state(b)
    newcomers = b.requests(range(ROWS, 2 * ROWS))
    expected = b.draft(b.fresh(newcomers))
    list(b.rounds(range(ROWS)))
    b.admit(newcomers)
    found = b.draft(b.engine.state)
    _demand_same(found, expected, "in a used row", hint=SHARES)
    _need_drafts(int(expected.num_valid.sum()))
    return f"{ROWS} rows, after {NUM_ROUNDS} rounds of others"


@enters(DRAFTER_CHECKS, "C1", "catch_up closes any lag, chunk by chunk and in one call")
def _catch_up(b: DrafterUnderTest) -> str:
    if b.drafter.lag(b.engine.state.drafter, b.rows(b.engine.state)) is None:
        raise NotApplicable("it keeps nothing that could lag")

    @jax.jit
    def lag_of(state: DecodeState) -> jax.Array | None:
        return b.drafter.lag(state.drafter, b.rows(state))

    shape = dataclasses.replace(b.shape, prefill_chunk=CHUNK)

    @jax.jit
    def catch_up(params, state: DecodeState, chunk_rows) -> DecodeState:
        own = function_params(b.complete, params)
        after = b.drafter.catch_up(shape, own, state.drafter, b.rows(state), chunk_rows)
        return state.replace(drafter=after)

    requests = b.requests(range(ROWS))
    lag = np.asarray(lag_of(b.fresh(requests, draft_length=0)))
    demand((lag == 0).all(), f"after the prompts were read, the lag is {lag.tolist()}, not 0")
    for _ in range(CHUNK + 5):  # rounds that draft nothing, until a row lags by more than a chunk
        b.engine.executor.run(1)
    lagging = _limited(b.engine.state, [b.num_nodes] * ROWS)
    lag = np.asarray(lag_of(lagging))
    chunks = [row for row in range(ROWS) for _ in range(-(-int(lag[row]) // CHUNK))]
    fresh, num_drafted = b.afresh(lagging), 0
    for calls in ([[row] for row in chunks], [[*chunks, -1]]):
        state, before = lagging, lag
        for rows in calls:
            num_read = CHUNK * np.bincount(np.array(rows) + 1, minlength=ROWS + 1)[1:]
            expected = np.maximum(before - num_read, 0)
            state = catch_up(b.engine.executor.params, state, np.array(rows, np.int32))
            after = np.asarray(lag_of(state))
            demand(
                (after == expected).all(),
                f"catch_up of rows {rows} took the lag from {before.tolist()} to {after.tolist()}, "
                f"not to {expected.tolist()}",
            )
            before = after
        found = b.draft(state)
        wrong = list(filter(None, (_differs(found, fresh, row, row) for row in range(ROWS))))
        allowed = 1 if b.is_rounded else 0
        demand(len(wrong) <= allowed, f"after it caught up, it drafted {wrong[:1]} as one afresh")
        num_drafted += int(found.num_valid.sum())
    _need_drafts(num_drafted)
    return f"a lag of {lag.tolist()} tokens, {CHUNK} at a time and in one call"


def _limited(state: DecodeState, limits: Sequence[int]) -> DecodeState:
    """The state with other draft limits, on the device of the old ones (or programs would be
    recompiled)."""
    limit = jax.device_put(np.asarray(limits, np.int32), state.draft_limit.sharding)
    return state.replace(draft_limit=limit)


@enters(DRAFTER_CHECKS, "C4", "score leaves the target's own hidden states and KV as they are")
def _score(b: DrafterUnderTest) -> str:
    if b.complete.score is None:
        raise NotApplicable("the target's own forward pass is used")
    target, params = b.target, b.engine.executor.params

    @jax.jit
    def both(params, state: DecodeState):
        rows = b.rows(state)
        draft, drafter_state, cache = decode_round.propose(b.parts, params, state, rows)
        window = decode_round.make_window(state, draft, tree_depth=b.shape.tree_depth)
        tokens = decode_round.window_tokens(state, draft)
        hidden, expected_cache = target.forward(params["target"], tokens, window, cache)
        scores, with_score, _ = decode_round.score(
            b.parts, params, drafter_state, rows, draft, tokens, window, cache
        )
        expected = hidden, *kv_at(expected_cache, window.slots)
        return expected, (scores.hidden, *kv_at(with_score, window.slots))

    def kv_at(cache: kv.KVCache, slots: jax.Array) -> list[jax.Array]:
        """k and v of each layer at `slots`, their heads flattened."""
        parts = [kv.read_slots(layer, cache.table, slots, cache.dtype) for layer in cache.layers]
        return [part.reshape(*slots.shape, -1) for pair in parts for part in pair]

    keeps_bits = b.complete.score_keeps_bits and getattr(target, "is_width_invariant", False)
    farthest, allowed = 0.0, 0.0 if keeps_bits else 256 * rounding_of(params)
    for _ in b.rounds(range(ROWS)):
        expected, found = jax.device_get(both(params, b.engine.state))
        farthest = max(farthest, *map(distance_of, found, expected))
        demand(
            farthest <= allowed,
            "hidden states or KV of the target's own rows differ from those of its forward pass "
            f"by {farthest:.1e}, where rounding allows {allowed:.1e}",
        )
    if keeps_bits:
        return "they are the same, to the bit"
    return f"they differ by at most {farthest:.1e}, by rounding"


@enters(DRAFTER_CHECKS, "C4", "E1: output with it equals plain output, greedy and sampled")
def _output(b: DrafterUnderTest) -> str:
    params = [mixed_params(i) for i in range(len(b.prompts))]
    b.engine.executor.reset()
    plain = b.engine.generate(b.prompts, params, speculate=False)
    num_accepted = num_drafted = 0
    # The last run sees what the others have left in a state that requests share.
    for draft_length in (b.num_nodes, 1, *[b.num_nodes] * b.complete.shares_state):
        drafted = b.engine.generate(b.prompts, params, draft_length=draft_length)
        num_accepted += demand_same_output(plain, drafted)
        num_drafted += sum(completion.acceptance.num_draft_tokens for completion in drafted)
    _need_drafts(num_drafted)
    return f"{len(plain)} requests; {num_accepted} drafts accepted"


@enters(DRAFTER_CHECKS, "C2", "nothing is compiled after the first requests")
def _trace_count(b: DrafterUnderTest) -> str:
    for numbers in (range(ROWS), range(ROWS, 2 * ROWS)):
        list(b.rounds(numbers))
    return demand_compiled_once(b.engine)


@enters(DRAFTER_CHECKS, "C4", "q is the distribution that the drafts were drawn from (chi-square)")
def _draft_probs(b: DrafterUnderTest) -> str:
    _need_draws(b)
    pairs = b.with_probs.draws(b.prompts[:ROWS], DRAWN, num_draws=NUM_DRAWS)
    drafts = [draft for _, draft in pairs]
    if drafts[0].q is None:
        for draft in drafts[1:]:
            where = "q is None, so drafts must be deterministic; under another key of the request"
            _demand_same(draft, drafts[0], where)
        _need_drafts(int(drafts[0].num_valid.sum()))
        return f"deterministic under {NUM_DRAWS} keys, and q is None"
    ranks, rng = [], np.random.default_rng((b.seed, 1))  # another generator than that of the keys
    for draft in drafts:
        is_valid = _is_valid(draft)
        q = np.asarray(draft.q, np.float64)[is_valid]
        tokens = np.asarray(draft.tokens)[is_valid]
        total = q.sum(axis=1)
        is_positive = np.isfinite(q).all() and (q >= 0).all()
        demand(is_positive, "q holds values that are negative or not finite")
        demand((np.abs(total - 1) < 1e-3).all(), f"q sums to {total.tolist()[:3]}, not to 1")
        q = np.where(_taken_by_siblings(draft, q.shape[1])[is_valid], 0, q)
        total = q.sum(axis=1)
        q_token = np.take_along_axis(q, tokens[:, None], axis=1)
        demand((q_token > 0).all(), "a token was drafted whose q is 0, or that a sibling has")
        # Where a token's share begins when the distribution is laid out from the likeliest token
        # on, and a random place within it: uniform if tokens are drawn from q.
        is_likelier = q > q_token
        is_likelier |= (q == q_token) & (np.arange(q.shape[1]) < tokens[:, None])
        begins = np.sum(np.where(is_likelier, q, 0), axis=1)
        ranks.extend((begins + rng.random(len(begins)) * q_token[:, 0]) / total)
    _need_drafts(len(ranks), least=100)
    counts, _ = np.histogram(ranks, bins=20, range=(0, 1))
    p_value = stats.chisquare(counts).pvalue
    demand(
        p_value >= ALPHA,
        f"{len(ranks)} drafted tokens do not follow q (chi-square, p = {p_value:.1g} < {ALPHA:g})",
    )
    return f"{len(ranks)} drafted tokens follow q (chi-square, p = {p_value:.2g})"


@enters(DRAFTER_CHECKS, "C4", "E3: every draw of its own noise is a new one")
def _fresh_noise(b: DrafterUnderTest) -> str:
    _need_draws(b)
    if not b.is_drawn:
        raise NotApplicable("it draws nothing")
    prompt = list(b.prompts[1])
    # A temperature so high that any distribution is nearly flat, so that equal noise shows as equal
    # tokens. Row 1 is a token longer than row 0 and has its key, as one request in two rounds; row
    # 2 is another request.
    prompts = [prompt, [*prompt, prompt[0]], prompt]
    hot = [{"temperature": 50.0, "top_p": 1.0}] * ROWS
    draws = b.with_probs.draws(
        prompts, hot, num_draws=NUM_DRAWS, keys_of=lambda keys: keys[np.array([0, 0, 2])]
    )
    drafts = [draft for _, draft in draws]
    # Siblings of one parent differ in any case, so only the first of them count.
    depth = _depths(drafts[0])[0]
    is_first = ~_taken_by_siblings(drafts[0], b.target.vocab_size)[0].any(axis=1)
    firsts = np.flatnonzero(is_first).tolist()
    deeper = [(m, n) for n in firsts for m in firsts if depth[m] == depth[n] + 1]
    pairs = {
        "two nodes of a round": [((0, n), (0, m)) for n, m in itertools.pairwise(firsts)],
        "two rounds at one position": [((0, m), (1, n)) for m, n in deeper],
        "two rounds at one node": [((0, n), (1, n)) for n in firsts],
        "two requests": [((0, n), (2, n)) for n in firsts],
    }
    total = 0
    for what, places in pairs.items():
        num_equal, num_pairs, expected = 0, 0, 0.0
        for draft in drafts:
            is_valid, q = _is_valid(draft), np.asarray(draft.q, np.float64)
            for mine, theirs in places:
                if is_valid[mine] and is_valid[theirs]:
                    num_pairs += 1
                    num_equal += int(draft.tokens[mine] == draft.tokens[theirs])
                    expected += float(np.sum(q[mine] * q[theirs]))
        total += num_pairs
        if num_pairs:
            p_value = stats.binom.sf(num_equal - 1, num_pairs, expected / num_pairs)
            demand(
                p_value >= ALPHA,
                f"{what} gave the same token {num_equal} of {num_pairs} times, where independent "
                f"draws would {expected:.0f} times: they share noise",
            )
    _need_drafts(total)
    return f"{NUM_DRAWS} drafts per row at temperature 50"


@enters(DRAFTER_CHECKS, "C4", "E3: with shared noise it draws as the target will")
def _shared_noise(b: DrafterUnderTest) -> str:
    _need_draws(b)
    if not b.is_drawn:
        raise NotApplicable("it draws nothing")
    num_tokens = 0
    for keyed, draft in b.with_shared_noise.draws(b.prompts[:ROWS], DRAWN, num_draws=8):
        position = keyed.num_committed[:, None] + jnp.asarray(_depths(draft) - 1)
        keys = sampling.position_keys(keyed.sampling, position)
        noise = np.asarray(sampling.gumbel(keys, b.target.vocab_size))
        with np.errstate(divide="ignore"):
            perturbed = np.log(np.asarray(draft.q)) + noise
        is_taken = _taken_by_siblings(draft, b.target.vocab_size)
        perturbed = np.where(is_taken, -np.inf, perturbed)
        tokens = np.asarray(draft.tokens)
        of_token = np.take_along_axis(perturbed, tokens[..., None], axis=2)[..., 0]
        missed = (of_token < perturbed.max(axis=2) - 1e-3) & _is_valid(draft)
        num_tokens += int(draft.num_valid.sum())
        demand(
            not missed.any(),
            "is_noise_shared was set, and it drafted a token that its own distribution and the "
            "target's noise do not give: it draws with noise of its own, and few drafts will be "
            "accepted",
        )
    _need_drafts(num_tokens)
    return f"{num_tokens} drafted tokens are those of its distribution under the target's noise"


def _need_draws(b: DrafterUnderTest) -> None:
    if b.complete.prunes_by_token:
        raise NotApplicable("prunes_by_token is True: what it keeps follows no q")


def _depths(draft: Draft) -> np.ndarray:
    """`[B, N]` int32, the depth of each node, from 1 on."""
    num_rows, num_nodes = draft.tokens.shape
    depths = np.zeros((num_rows, num_nodes + 1), np.int32)  # the last is that of the root
    for node, parents in enumerate(np.clip(draft.parents, -1, num_nodes).T):
        depths[:, node] = 1 + depths[np.arange(num_rows), parents]
    return depths[:, :-1]


def _taken_by_siblings(draft: Draft, vocab_size: int) -> np.ndarray:
    """`[B, N, V]` bool, the tokens of each node's earlier siblings, which cannot be drawn for
    it."""
    tokens, parents = np.asarray(draft.tokens), np.asarray(draft.parents)
    is_earlier = np.tri(tokens.shape[1], k=-1, dtype=bool)[None]
    is_sibling = is_earlier & (parents[:, :, None] == parents[:, None, :])
    is_token = tokens[:, None, :, None] == np.arange(vocab_size)
    return np.any(is_sibling[..., None] & is_token, axis=2)


def _need_own_state(b: DrafterUnderTest) -> None:
    if b.complete.shares_state:
        raise NotApplicable("shares_state is True: its drafts may depend on other requests")


def _need_drafts(number: int, *, least: int = 1) -> None:
    if number < least:
        found = f"only {number} tokens were" if number else "nothing was"
        raise Untested(f"{found} drafted; give prompts on which it drafts")
