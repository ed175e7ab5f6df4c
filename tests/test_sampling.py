"""Distributions, penalties and draws of rows: against a plain NumPy reference, and Hugging Face's
warpers where torch is installed."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import sampling
from jaxspec.decode.round import draft_context
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.types import BatchView, Draft, DraftContext, RowSampling, Window

INF = float("inf")
OFF = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "prompt_length": 0,
    "min_length": 0,
}
NUM_SLOTS = 16

adjust, choose, filtered_logits, probs_of, scores_of = map(
    jax.jit,
    (
        sampling.adjust,
        sampling.choose,
        sampling.filtered_logits,
        sampling.distribution,
        sampling.scores,
    ),
)
draw_draft = jax.jit(
    sampling.draw_draft, static_argnames=("vocab_size", "is_noise_shared", "needs_probs")
)


def row_sampling(*rows: dict, seed: int = 0) -> RowSampling:
    """Parameters of a batch; row b has the seed `seed + b` unless it names one."""
    values = [OFF | row for row in rows]
    columns = {}
    for name, off in OFF.items():
        dtype = jnp.float32 if isinstance(off, float) else jnp.int32
        columns[name] = jnp.asarray([row[name] for row in values], dtype)
    seeds = [row.get("seed", seed + index) for index, row in enumerate(rows)]
    keys = np.stack([sampling.request_key(of_row) for of_row in seeds])
    return RowSampling(key=jnp.asarray(keys), **columns)


def batch(*rows: dict, tokens=None, stop_tokens=None, seed: int = 0) -> BatchView:
    """A batch whose row b has committed `tokens[b]`."""
    tokens = [[0]] * len(rows) if tokens is None else tokens
    buffer = np.full((len(rows), NUM_SLOTS), 3, np.int32)  # garbage, which is a valid token
    for row, committed in zip(buffer, tokens, strict=True):
        row[: len(committed)] = committed
    stops = [[]] * len(rows) if stop_tokens is None else stop_tokens
    return BatchView(
        tokens=jnp.asarray(buffer),
        num_committed=jnp.asarray([len(committed) for committed in tokens], jnp.int32),
        draft_limit=jnp.full((len(rows),), 4, jnp.int32),
        stop_tokens=jnp.asarray([[*stop, -1, -1][:2] for stop in stops], jnp.int32),
        sampling=row_sampling(*rows, seed=seed),
    )


def nothing_drafted(rows: BatchView) -> DraftContext:
    """For the one token that follows the committed ones."""
    return sampling.chain_prefix(rows, jnp.zeros((rows.tokens.shape[0], 0), jnp.int32))


def softmax(scores):
    scores = np.asarray(scores, np.float64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def reference(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution of one row in float64, ties at a boundary kept."""
    scores = np.asarray(logits, np.float64) / temperature
    if top_k > 0:
        scores = np.where(scores < np.sort(scores)[::-1][:top_k][-1], -INF, scores)
    if top_p < 1:
        distribution = softmax(scores)
        above = np.array([distribution[scores > score].sum() for score in scores])
        scores = np.where(above < top_p, scores, -INF)
    distribution = softmax(scores)
    return softmax(np.where(distribution < min_p * distribution.max(), -INF, scores))


def some_logits(kind: str, vocab_size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(vocab_size) * 3
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "holes":
        logits[rng.random(vocab_size) < 0.6] = -INF
    elif kind == "peaked":
        logits[rng.integers(vocab_size)] = 40
    elif kind == "flat":
        logits = rng.standard_normal(vocab_size) * 1e-3
    elif kind == "equal":
        logits = np.zeros(vocab_size)
    return logits.astype(np.float32)


FILTERS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.9},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.3},
    {"top_p": 0.93, "temperature": 1.4},
    {"top_p": 0.9999},
    {"min_p": 0.08},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.8},
]
KINDS = ["plain", "ties", "holes", "peaked", "flat", "equal"]


@pytest.fixture(scope="module", params=[False, True], ids=["with loops", "without loops"])
def distributions(request):
    """Distribution of every kind of logits under every filter, from one batch that mixes them
    all; with loops, and as on a GPU without."""
    found = {}
    filtered_logits = jax.jit(sampling.filtered_logits)
    for vocab_size in (61, 4096):
        cases = list(itertools.product(KINDS, range(len(FILTERS))))
        logits = np.stack([some_logits(kind, vocab_size, KINDS.index(kind)) for kind, _ in cases])
        parameters = row_sampling(*(FILTERS[index] for _, index in cases))
        parameters = parameters.replace(loops_run_on_host=request.param)
        got = np.asarray(filtered_logits(jnp.asarray(logits)[:, None], parameters))[:, 0]
        for case, of_case, its_logits in zip(cases, got, logits, strict=True):
            found[vocab_size, *case] = (of_case, its_logits)
    return found


def assert_same_distribution(scores, expected, logits):
    """The same tokens kept, except where fp32 cannot tell which side of a boundary they are on."""
    kept, wanted = scores > -INF, expected > 0
    np.testing.assert_allclose(softmax(scores)[kept & wanted], expected[kept & wanted], rtol=3e-4)
    for token in np.flatnonzero(kept != wanted):
        # It ties with the boundary: the mass above it is the limit's, within rounding.
        others = np.flatnonzero(kept & wanted)
        assert logits[token] <= logits[others].min() + 1e-6, token
    assert np.abs(softmax(scores) - expected).sum() < 2e-3


@pytest.mark.parametrize("vocab_size", [61, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_the_references(distributions, kind, vocab_size):
    for index, options in enumerate(FILTERS):
        scores, logits = distributions[vocab_size, kind, index]
        expected = reference(logits, **options)
        assert_same_distribution(scores, expected, logits)
        if kind != "equal":  # there, every boundary is a tie
            assert (scores > -INF).sum() == (expected > 0).sum(), options
        if options.get("top_k", 0) or options.get("min_p", 0) or kind == "ties":
            np.testing.assert_array_equal(scores > -INF, expected > 0)


@pytest.mark.parametrize("vocab_size", [61, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_the_distribution_is_that_of_hugging_faces_warpers(distributions, kind, vocab_size):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    warpers = {
        "temperature": hf.TemperatureLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    for index, options in enumerate(FILTERS):
        scores, logits = distributions[vocab_size, kind, index]
        theirs = torch.from_numpy(logits)[None]
        for name, warper in warpers.items():  # in the order in which `generate` applies them
            if name in options:
                theirs = warper(options[name])(None, theirs)
        theirs = theirs[0].numpy()
        kept, wanted = scores > -INF, theirs > -INF
        # Where tokens tie with the last one that top-p keeps, Hugging Face keeps what its sort
        # leaves at the end; here all of them stay.
        assert not np.any(wanted & ~kept), options
        boundary = logits[wanted].min()
        np.testing.assert_array_equal(logits[kept & ~wanted], boundary)
        if not np.any(kept & ~wanted):
            distribution, their_probs_of = (
                softmax(scores),
                torch.softmax(torch.from_numpy(theirs), 0).numpy(),
            )
            np.testing.assert_allclose(distribution, their_probs_of, rtol=1e-4, atol=1e-7)
        else:
            assert kind in ("ties", "equal"), options
            assert "top_p" in options


def test_parameters_that_are_off_change_no_bit():
    logits = np.stack([some_logits(kind, 997, 5) for kind in KINDS])
    logits[0, :2] = 0.0, -0.0
    off = [{}] * len(KINDS)
    asking = {"top_k": 5, "top_p": 0.4, "min_p": 0.3, "temperature": 2.0}
    for rows in (off, [*off[:3], asking, *off[4:]], [*off[:3], {"top_p": 0.1}, *off[4:]]):
        got = filtered_logits(jnp.asarray(logits)[:, None], row_sampling(*rows))[:, 0]
        is_off = [row == {} for row in rows]
        np.testing.assert_array_equal(
            np.asarray(got)[is_off].view(np.uint32), logits[is_off].view(np.uint32)
        )
    assert np.isneginf(np.asarray(got)[3]).any()


def test_a_rows_distribution_and_draws_do_not_depend_on_its_neighbours():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.standard_normal((4, 3, 211)).astype(np.float32) * 2)
    mine = {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01, "seed": 77}
    asking = {
        "top_k": 3, "top_p": 0.5, "min_p": 0.2, "temperature": 3.0, "repetition_penalty": 1.7,
        "presence_penalty": 0.4, "frequency_penalty": -0.3, "min_length": 9,
    }  # fmt: skip
    cold = {"temperature": 0.0}
    found = []
    for neighbours in ([{}] * 3, [asking] * 3, [cold] * 3, [asking, cold, {"temperature": 0.1}]):
        rows = batch(neighbours[0], mine, *neighbours[1:], tokens=[[1, 2]] * 4)
        prefix = sampling.chain_prefix(rows, jnp.full((4, 2), 5, jnp.int32))
        scores = scores_of(logits, rows, prefix)
        distribution = probs_of(logits, rows, prefix)
        chosen = choose(logits, rows, prefix)
        found.append([np.asarray(x[1]) for x in (scores, distribution, chosen)])
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_greedy_row_takes_the_arg_max_whatever_its_neighbours_do():
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((2, 1, 50)), jnp.float32)
    for neighbour in ({}, {"temperature": 0.0}, {"frequency_penalty": 0.5, "top_p": 0.5}):
        rows = batch({"temperature": 0.0, "top_p": 0.1}, neighbour)
        chosen = choose(logits, rows, nothing_drafted(rows))
        assert int(chosen[0, 0]) == int(jnp.argmax(logits[0, 0]))


def test_zeros_of_both_signs_tie():
    logits = np.full((1, 1, 6), -1.0, np.float32)
    logits[0, 0, 1:4] = 0.0, -0.0, 0.0
    for options in ({"top_k": 1}, {"top_k": 2}, {"top_p": 0.2}):
        got = filtered_logits(jnp.asarray(logits), row_sampling(options))
        assert (np.asarray(got)[0, 0] > -INF).tolist() == [False, True, True, True, False, False]


@pytest.mark.parametrize("top_p", [1e-45, 1e-30, 1e-8])
def test_the_smallest_top_p_keeps_the_likeliest_token(top_p):
    logits = some_logits("plain", 61, 1)
    got = np.asarray(
        filtered_logits(jnp.asarray(logits)[None, None], row_sampling({"top_p": top_p}))
    )
    assert np.flatnonzero(got[0, 0] > -INF).tolist() == [logits.argmax()]


def primitives(jaxpr):
    """Names of all primitives, in branches and loops too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


def test_nothing_sorts_the_vocabulary():
    rows = batch({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, {})
    logits = jnp.zeros((2, 1, 61))
    names = set()
    for function in (sampling.choose, sampling.distribution):
        names |= set(
            primitives(jax.make_jaxpr(function)(logits, rows, nothing_drafted(rows)).jaxpr)
        )
    assert {"cond", "scan"} <= names  # branches and loops were looked into
    assert "exp" in names
    assert not names & {"sort", "top_k", "approx_top_k"}
    assert "sort" in set(primitives(jax.make_jaxpr(jax.jit(jnp.sort))(logits).jaxpr))


@pytest.mark.parametrize("runs_on_host", [False, True])
def test_on_a_gpu_nothing_loops(runs_on_host):
    rows = batch({"top_k": 5, "top_p": 0.5, "presence_penalty": 0.1}, {})
    rows = rows.replace(sampling=rows.sampling.replace(loops_run_on_host=runs_on_host))
    traced = jax.make_jaxpr(lambda *given: sampling.choose(*given))(
        jnp.zeros((2, 1, 61)), rows, nothing_drafted(rows)
    )
    assert bool({"while", "scan"} & set(primitives(traced.jaxpr))) != runs_on_host


# Penalties


def penalised(logits, *, prompt, output, repetition=1.0, presence=0.0, frequency=0.0):
    """Penalties token by token, in float64."""
    scores = np.asarray(logits, np.float64).copy()
    for token in set(prompt) | set(output):
        scores[token] = (
            scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        )
    for token in set(output):
        scores[token] -= frequency * list(output).count(token) + presence
    return scores


@pytest.mark.parametrize("runs_on_host", [False, True])
def test_penalties_follow_their_formulas(runs_on_host):
    adjust = jax.jit(sampling.adjust)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3, 1, 12)).astype(np.float32)
    logits[:, :, 4] = 0.0
    logits[:, :, 5] = -INF
    committed = [[1, 2, 2, 7, 4, 7, 7], [5, 5], [0, 1, 2, 3, 4, 5, 6, 7]]
    prompt_lengths = [3, 2, 1]
    values = [(1.3, 0.5, 0.25), (0.8, 1.0, 1.0), (1.0, -0.5, 0.7)]
    rows = batch(
        *(
            {
                "repetition_penalty": repetition,
                "presence_penalty": presence,
                "frequency_penalty": frequency,
                "prompt_length": prompt_length,
            }
            for (repetition, presence, frequency), prompt_length in zip(
                values, prompt_lengths, strict=True
            )
        ),
        tokens=committed,
    )
    rows = rows.replace(sampling=rows.sampling.replace(loops_run_on_host=runs_on_host))
    got = adjust(jnp.asarray(logits), rows, nothing_drafted(rows))[:, 0]
    for row, (tokens, length) in enumerate(zip(committed, prompt_lengths, strict=True)):
        repetition, presence, frequency = values[row]
        expected = penalised(
            logits[row, 0],
            prompt=tokens[:length],
            output=tokens[length:],
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
        np.testing.assert_allclose(np.asarray(got)[row], expected, rtol=1e-5, atol=1e-6)


def test_repetition_penalty_is_hugging_faces():
    torch = pytest.importorskip("torch")
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(1).standard_normal((1, 40)).astype(np.float32) * 4
    tokens = [3, 9, 9, 20, 0, 33]
    for penalty in (1.2, 0.7):
        rows = batch({"repetition_penalty": penalty, "prompt_length": 2}, tokens=[tokens])
        got = adjust(jnp.asarray(logits)[:, None], rows, nothing_drafted(rows))
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([tokens]), torch.from_numpy(logits.copy())
        )
        np.testing.assert_allclose(np.asarray(got)[0], theirs.numpy(), rtol=1e-6)


def with_biases(rows: BatchView, *params: SamplingParams) -> BatchView:
    """The batch with the biases of each row's parameters."""
    each = [one.of_row(prompt_length=1).bias for one in params]
    bias = jax.tree.map(lambda *values: jnp.stack(values), *each)
    return rows.replace(sampling=rows.sampling.replace(bias=bias))


def test_biases_come_before_penalties_and_leave_other_rows_alone():
    logits = np.random.default_rng(6).standard_normal((4, 1, 50)).astype(np.float32)
    logits[3, 0, :2] = 0.0, -0.0
    penalty = {"repetition_penalty": 2.0}
    rows = batch(penalty, {}, {}, {}, tokens=[[7, 9]] * 4)
    rows = with_biases(
        rows,
        SamplingParams(logit_bias={7: 5.0, 8: -2}),
        SamplingParams(allowed_token_ids=[4, 0, 49], logit_bias={0: 3, 5: 100}),
        SamplingParams(allowed_token_ids=range(50)),
        SamplingParams(),
    )
    got = np.asarray(adjust(jnp.asarray(logits), rows, nothing_drafted(rows)))[:, 0]
    expected = logits[:, 0].copy()
    expected[0, 7] += 5
    expected[0, 8] -= 2
    for token in (7, 9):  # of the context
        expected[0, token] *= 0.5 if expected[0, token] > 0 else 2
    expected[1, 0] += 3
    expected[1, np.setdiff1d(np.arange(50), [0, 4, 49])] = -INF
    np.testing.assert_array_equal(got[:3], expected[:3])
    np.testing.assert_array_equal(got[3].view(np.uint32), expected[3].view(np.uint32))


def test_a_greedy_row_takes_the_arg_max_of_its_biased_logits():
    logits = jnp.zeros((2, 1, 50), jnp.float32).at[:, :, 3].set(8.0)
    rows = with_biases(
        batch({"temperature": 0.0}, {"temperature": 0.0}),
        SamplingParams(logit_bias={11: 9}),
        SamplingParams(),
    )
    assert choose(logits, rows, nothing_drafted(rows))[:, 0].tolist() == [11, 3]
    out = rows.replace(sampling=sampling.as_greedy(rows.sampling, jnp.array([True, False])))
    assert [bool(sampling.is_greedy(each)) for each in (rows, out)] == [False, True]


def test_a_model_that_rules_out_every_allowed_token_leaves_them_to_the_bias():
    logits = jnp.full((1, 1, 50), -INF).at[0, 0, 3].set(1.0)
    params = SamplingParams(allowed_token_ids=[20, 21], logit_bias={21: 1})
    rows = with_biases(batch({}), params)
    probs = np.asarray(probs_of(logits, rows, nothing_drafted(rows)))[0, 0]
    np.testing.assert_allclose(probs[20:22], softmax([0, 1]), rtol=1e-6)
    assert np.count_nonzero(probs) == 2


ASKING = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.6,
    "frequency_penalty": 0.35,
    "prompt_length": 2,
    "min_length": 7,
    "temperature": 0.8,
}


def test_penalties_of_a_drafted_chain_are_those_of_committed_tokens():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.standard_normal((2, 5, 9)), jnp.float32)
    committed, drafted = [[1, 2, 3], [4, 4, 4, 8]], [[3, 3, 0, 1], [8, 0, 4, 4]]
    stops = [[0, 5], [2]]
    rows = batch(ASKING, ASKING, tokens=committed, stop_tokens=stops)
    prefix = sampling.chain_prefix(rows, jnp.asarray(drafted, jnp.int32))
    got = adjust(logits, rows, prefix)
    chosen = choose(logits, rows, prefix)
    for node in range(5):
        later = batch(
            ASKING,
            ASKING,
            tokens=[a + b[:node] for a, b in zip(committed, drafted, strict=True)],
            stop_tokens=stops,
        )
        one = logits[:, node : node + 1]
        expected = adjust(one, later, nothing_drafted(later))
        np.testing.assert_array_equal(got[:, node : node + 1], expected)
        drawn = choose(one, later, nothing_drafted(later))
        np.testing.assert_array_equal(chosen[:, node : node + 1], drawn)


def test_penalties_in_a_tree_count_the_path_of_each_node():
    # root -> 0, root -> 1; 1 -> 2, 1 -> 3; 3 -> 4; node 5 is not valid
    parents = [-1, -1, 1, 1, 3, 0]
    tokens = [6, 3, 3, 5, 3, 8]
    paths_by_hand = {0: [], 1: [0], 2: [1], 3: [1, 2], 4: [1, 3], 5: [1, 3, 4]}
    depth = [0, 1, 1, 2, 2, 3, 1]
    paths = np.zeros((1, 7, 7), np.int32)
    for entry, path in paths_by_hand.items():
        paths[0, entry, 1 : len(path) + 1] = [node + 1 for node in path]
    committed = [1, 2, 3]
    rows = batch(ASKING, tokens=[committed], stop_tokens=[[4]])
    draft = Draft(
        tokens=jnp.asarray([tokens], jnp.int32),
        parents=jnp.asarray([parents], jnp.int32),
        num_valid=jnp.asarray([5], jnp.int32),
    )
    start = len(committed) - 1
    window = Window(
        start=jnp.asarray([start], jnp.int32),
        positions=start + jnp.asarray([depth], jnp.int32),
        slots=jnp.asarray([np.arange(7) + start], jnp.int32),
        paths=jnp.asarray(paths),
    )
    prefix = draft_context(draft, window)
    logits = jnp.asarray(np.random.default_rng(7).standard_normal((1, 7, 9)), jnp.float32)
    got = adjust(logits, rows, prefix)
    for entry, path in paths_by_hand.items():
        later = batch(
            ASKING, tokens=[committed + [tokens[node] for node in path]], stop_tokens=[[4]]
        )
        one = logits[:, entry : entry + 1]
        assert int(prefix.position[0, entry]) == len(committed) + len(path)
        expected = adjust(one, later, nothing_drafted(later))
        np.testing.assert_array_equal(got[:, entry : entry + 1], expected)


def test_noise_of_a_tree_is_drawn_once_for_each_depth(monkeypatch):
    depth = jnp.asarray([[0, 1, 1, 2, 2, 2], [0, 1, 2, 1, 1, 2]], jnp.int32)
    rows = batch({"temperature": 0.8}, {"temperature": 1.2}, tokens=[[1, 2, 3], [4, 4, 4, 8]])
    logits = jnp.asarray(np.random.default_rng(8).standard_normal((2, 6, 9)), jnp.float32)
    prefix = sampling.chain_prefix(rows, jnp.zeros((2, 5), jnp.int32))
    prefix = prefix.replace(position=rows.num_committed[:, None] + depth)
    expected = sampling.scores(logits, rows, prefix)
    drawn, real = [], sampling.gumbel

    def gumbel(keys, vocab_size):
        drawn.append(keys.shape)
        return real(keys, vocab_size)

    monkeypatch.setattr(sampling, "gumbel", gumbel)
    found = sampling.scores(logits, rows, prefix.replace(max_depth=2))
    np.testing.assert_array_equal(found, expected)
    assert drawn == [(2, 3)]


MANY_KINDS = (
    {},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.1, "top_k": 4, "min_p": 0.1},
    {"temperature": 0.9, **ASKING},
)


def window_of(num_positions: int, max_depth: int | None):
    """Rows of all kinds, their logits, and what precedes each position; nodes of a tree lie at
    depths 0, 1, 2, ..., `max_depth`, 1, 2, ..."""
    rows = batch(*MANY_KINDS, tokens=[[1, 2, 3], [4, 4], [5], [1, 1, 2]], stop_tokens=[[4]] * 4)
    random = np.random.default_rng(num_positions)
    logits = jnp.asarray(3 * random.standard_normal((4, num_positions, 61)), jnp.float32)
    drafted = jnp.asarray(random.integers(0, 61, (4, num_positions - 1)), jnp.int32)
    prefix = sampling.chain_prefix(rows, drafted)
    if max_depth is not None:
        depth = np.minimum(np.arange(num_positions), 1 + (np.arange(num_positions) - 1) % max_depth)
        position = rows.num_committed[:, None] + jnp.asarray(depth, jnp.int32)[None]
        prefix = prefix.replace(position=position, max_depth=max_depth)
    return logits, rows, prefix


@pytest.mark.parametrize(
    ("num_positions", "max_depth"),
    [
        *((2, None), (11, 3), (17, None)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, 3), (5, None), (5, 3), (11, None), (17, 3))
        ),
    ],
)
def test_positions_are_drawn_in_parts_as_if_at_once(num_positions, max_depth):
    logits, rows, prefix = window_of(num_positions, max_depth)
    at_once = jnp.argmax(scores_of(logits, rows, prefix), axis=-1)
    found = choose(logits, rows, prefix)
    np.testing.assert_array_equal(found, at_once)
    # Drawing decides: the rows that sample do not get the likeliest tokens.
    assert np.any(np.asarray(found[1:]) != np.asarray(jnp.argmax(logits, axis=-1)[1:]))


def test_a_part_with_the_noise_of_another_position_would_be_seen():
    logits, rows, prefix = window_of(11, None)
    shifted = prefix.replace(position=prefix.position + 2)
    assert np.any(choose(logits, rows, shifted) != choose(logits, rows, prefix))


def test_drawing_needs_a_part_of_the_memory_that_all_scores_take():
    rows = batch(*MANY_KINDS, *MANY_KINDS)
    logits = jax.ShapeDtypeStruct((8, 6, 4096), jnp.float32)
    prefix = sampling.chain_prefix(rows, jnp.zeros((8, 5), jnp.int32))

    def arrays_of_logits(function) -> float:
        memory = function.lower(logits, rows, prefix).compile().memory_analysis()
        return memory.temp_size_in_bytes / (8 * 6 * 4096 * 4)

    assert arrays_of_logits(choose) < 3 < arrays_of_logits(scores_of)
    # But few tokens are drawn at once, which takes less time.
    assert [sampling.num_drawn_together(rows, 5) for rows in (1, 2, 4, 8, 64)] == [5, 4, 2, 1, 1]
    assert sampling.num_drawn_together(64, 17) == 3


def test_counting_the_buffer_instead_of_the_path_would_be_seen():
    rows = batch(ASKING, tokens=[[1, 2, 3]])
    tokens = jnp.asarray([[3, 3, 0, 1]], jnp.int32)
    right = sampling.chain_prefix(rows, tokens)
    wrong = right.replace(is_before=jnp.ones_like(right.is_before))
    logits = jnp.ones((1, 5, 9))
    a, b = (adjust(logits, rows, prefix) for prefix in (right, wrong))
    np.testing.assert_array_equal(a[:, 4], b[:, 4])
    assert np.abs(np.asarray(a - b)[:, :4]).max() > 0.1


def test_min_tokens_bars_stop_tokens_and_nothing_else():
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((2, 4, 9)), jnp.float32)
    rows = batch({"min_length": 4}, {}, tokens=[[1, 2], [1, 2]], stop_tokens=[[8, 0], [8, 0]])
    prefix = sampling.chain_prefix(rows, jnp.zeros((2, 3), jnp.int32))
    got = np.asarray(adjust(logits, rows, prefix))
    barred = np.isneginf(got)
    assert np.argwhere(barred).tolist() == [[0, 0, 0], [0, 0, 8], [0, 1, 0], [0, 1, 8]]
    np.testing.assert_array_equal(got[~barred], np.asarray(logits)[~barred])


# Keys and draws


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**31 - 1])
def test_small_seeds_are_jaxs_own(seed):
    np.testing.assert_array_equal(
        sampling.request_key(seed), jax.random.key_data(jax.random.key(seed))
    )


def test_large_seeds_differ():
    seeds = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**33, 2**62, 2**63 - 1]
    keys = {tuple(sampling.request_key(seed).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)


def key_bits(keys):
    return [tuple(bits) for bits in np.asarray(jax.random.key_data(keys)).reshape(-1, 2).tolist()]


def test_round_keys_never_meet():
    node = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 5))
    found = []
    for length in range(1, 9):
        rows = batch({"seed": 3}, {"seed": 2**40 + 3}, tokens=[[1] * length] * 2)
        for stream in sampling.Stream:
            found += key_bits(sampling.round_keys(rows, node, stream))
        place = jnp.full((2, 1), length, jnp.int32)
        found += key_bits(sampling.position_keys(rows.sampling, place))
    assert len(found) == 8 * (2 * 5 * 3 + 2)
    assert len(set(found)) == len(found)


def test_position_keys_do_not_depend_on_the_round():
    parameters = row_sampling({"seed": 9})
    whole = key_bits(sampling.position_keys(parameters, jnp.arange(12, dtype=jnp.int32)[None]))
    for start in (0, 3, 7):
        place = jnp.arange(start, start + 4, dtype=jnp.int32)[None]
        assert key_bits(sampling.position_keys(parameters, place)) == whole[start : start + 4]
    assert key_bits(jax.random.fold_in(jax.random.key(9), 5)) == [whole[5]]


def test_noise_depends_on_its_key_alone():
    keys = jax.vmap(jax.random.key)(jnp.arange(6, dtype=jnp.uint32)).reshape(2, 3)
    noise = np.asarray(sampling.gumbel(keys, 50))
    assert noise.shape == (2, 3, 50)
    alone = np.asarray(sampling.gumbel(keys[1, 2][None], 50))[0]
    np.testing.assert_array_equal(noise[1, 2], alone)
    assert len(np.unique(noise[:, :, 0])) == 6


def test_gumbel_noise_has_the_right_distribution_in_both_tails():
    stats = pytest.importorskip("scipy.stats")
    keys = jax.vmap(jax.random.key)(jnp.arange(64, dtype=jnp.uint32))
    noise = np.asarray(sampling.gumbel(keys, 2**16), np.float64).ravel()  # 4.2 million draws
    # Alpha 1e-3 for each; the seeds are fixed.
    assert stats.kstest(noise[::64], "gumbel_r").pvalue > 1e-3
    for high in (9.0, 11.0, 13.0):
        expected = len(noise) * -np.expm1(-np.exp(-high))
        seen = int((noise > high).sum())
        assert stats.poisson.ppf(5e-4, expected) <= seen <= stats.poisson.isf(5e-4, expected)
    low = int((noise < -2.5).sum())
    expected = len(noise) * np.exp(-np.exp(2.5))
    assert stats.poisson.ppf(5e-4, expected) <= low <= stats.poisson.isf(5e-4, expected)
    assert np.isfinite(noise).all()


@pytest.mark.slow
@pytest.mark.as_shipped
def test_noise_can_be_higher_than_the_default_modes():
    # The highest draw of jax.random.gumbel's default mode is 15.94, so that a token of probability
    # 1e-8 would never be drawn.
    noise = jax.jit(lambda keys: jnp.max(sampling.gumbel(keys, 2**18)))
    highest = 0.0
    for first in range(0, 256, 16):
        seeds = jnp.arange(first, first + 16, dtype=jnp.uint32)
        highest = max(highest, float(noise(jax.vmap(jax.random.key)(seeds))))
    assert highest > 16.1  # of 6.7e7 draws some 7 are expected there: none has p = 1e-3


def chi_square_p(counts, distribution):
    """p-value of the counts; cells of fewer than 5 expected are put together."""
    stats = pytest.importorskip("scipy.stats")
    expected = (
        np.asarray(distribution, np.float64) / np.sum(distribution, dtype=np.float64) * counts.sum()
    )
    assert counts[distribution == 0].sum() == 0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return stats.chisquare(observed[keep], wanted[keep]).pvalue


@pytest.mark.parametrize("index", [0, 1, 7, 11])
def test_tokens_are_drawn_by_the_distribution(index):
    num_rows, options = 4000, FILTERS[index]
    logits = some_logits("plain", 61, 8)
    rows = batch(*[options] * num_rows, seed=10_000)
    chosen = choose(
        jnp.broadcast_to(jnp.asarray(logits), (num_rows, 1, 61)), rows, nothing_drafted(rows)
    )
    counts = np.bincount(np.asarray(chosen)[:, 0], minlength=61)
    assert chi_square_p(counts, reference(logits, **options)) > 1e-3
    # The check has teeth: the same draws do not follow the distribution of a temperature 15 %
    # higher.
    warmer = options | {"temperature": options.get("temperature", 1.0) * 1.15, "top_p": 1.0}
    warmer |= {"top_k": 0, "min_p": 0.0}
    assert chi_square_p(counts, reference(logits, **warmer)) < 1e-3


def test_weights_are_drawn_in_proportion():
    weights = np.array([0.0, 1e-3, 5.0, 2.0, 0.0, 1.5], np.float32)
    keys = jax.vmap(jax.random.key)(jnp.arange(4000, dtype=jnp.uint32))
    drawn = sampling.draw_weighted(keys, jnp.broadcast_to(jnp.asarray(weights), (4000, 6)))
    counts = np.bincount(np.asarray(drawn), minlength=6)
    assert chi_square_p(counts, weights) > 1e-3


def test_scores_that_are_no_numbers_draw_nothing():
    logits = np.zeros((3, 1, 7), np.float32)
    logits[0, 0, 3] = np.nan
    logits[1, 0, 3] = INF
    for temperature in (0.0, 1.0):
        rows = batch(*[{"temperature": temperature, "top_p": 0.5}] * 3)
        chosen = choose(jnp.asarray(logits), rows, nothing_drafted(rows))
        assert chosen[:2, 0].tolist() == [-1, -1]
        assert int(chosen[2, 0]) >= 0


# Drafts


def draw(logits, rows, node, *, vocab_size, shared=True, drafted=None):
    drafted = jnp.full((rows.tokens.shape[0], 3), 1, jnp.int32) if drafted is None else drafted
    drawn = draw_draft(
        logits,
        rows,
        drafted,
        jnp.int32(node),
        vocab_size=vocab_size,
        is_noise_shared=shared,
        needs_probs=True,
    )
    return drawn.token, drawn.distribution


def test_a_drafter_with_the_targets_logits_draws_the_targets_tokens():
    rng = np.random.default_rng(6)
    logits = jnp.asarray(rng.standard_normal((3, 4, 31)), jnp.float32)
    rows = batch(ASKING, {"top_p": 0.7}, {"temperature": 0.0}, tokens=[[1, 2, 3], [4], [5, 6]])
    drafted = jnp.zeros((3, 3), jnp.int32)
    distributions = []
    for node in range(3):
        token, q = draw(logits[:, node], rows, node, vocab_size=31, drafted=drafted)
        drafted = drafted.at[:, node].set(token)
        distributions.append(q)
    prefix = sampling.chain_prefix(rows, drafted)
    np.testing.assert_array_equal(choose(logits, rows, prefix)[:, :3], drafted)
    # q is the distribution that the target has there, to the bit: the same operations in the same
    # order.
    expected = probs_of(logits, rows, prefix)[:2, :3]
    np.testing.assert_array_equal(jnp.stack(distributions, axis=1)[:2], expected)


def test_noise_of_its_own_makes_a_drafter_independent():
    rows = batch(*[{}] * 400)
    logits = jnp.zeros((400, 31))
    shared, own = (draw(logits, rows, 0, vocab_size=31, shared=s)[0] for s in (True, False))
    target = choose(logits[:, None], rows, nothing_drafted(rows))[:, 0]
    np.testing.assert_array_equal(shared, target)
    assert 0 < int(jnp.sum(own == target)) < 40  # 13 expected


def test_a_drafter_never_proposes_what_the_target_lacks():
    rows = batch({}, {"temperature": 0.0}, {"top_k": 4})
    wide = jnp.full((3, 20), 9.0).at[:, :12].set(0.0)  # the ids from 12 on are the likeliest
    token, q = draw(wide, rows, 1, vocab_size=12)
    assert np.all(np.asarray(token) < 12)
    assert q.shape == (3, 12)
    token, q = draw(jnp.zeros((3, 5)), rows, 1, vocab_size=12)
    assert np.all(np.asarray(token) < 5)
    np.testing.assert_array_equal(np.asarray(q)[[0, 2], 5:], 0)
    np.testing.assert_allclose(np.asarray(q)[[0, 2]].sum(axis=1), 1, rtol=1e-6)
