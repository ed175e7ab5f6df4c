"""Exact output distributions of verifiers over consecutive rounds, noise key by noise key.

The production functions run on every case that two rounds over a small vocabulary can meet, with
their sources of randomness replaced: which keys they ask noise of is recorded, and so is what they
decide for every outcome of that noise. Each *distinct* key is one independent random symbol, equal
keys are the same symbol, and the distribution of the output is the sum over all symbols. So a wrong
acceptance, a wrong residual and a key schedule that uses noise twice all show as a bias.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxspec import sampling
from jaxspec.drafters import draft_model
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.sampling import neutral_sampling
from jaxspec.types import BatchView, Draft

PROMPT_LENGTH = 3
ROUNDING = 2e-7  # of fp32; a bias that anybody could notice is thousands of times it
V, DEPTH = 3, 8  # vocabulary of the tables, and tokens of two rounds of three drafts
LARGEST_DRAW = 1 - 2**-24  # of fp32 draws in [0, 1)
NEVER = 1e-7  # probability below the resolution of such draws
NUM_STEPS, NUM_REFINEMENTS = 8, 8  # of a search for a threshold, to 2**-24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A target and a drafter as tables.

    Attributes:
      p: `[D, V, V]`, the target's distribution after `D` emitted tokens of which `V` was the last.
      q: the drafter's, alike; None for deterministic drafts.
      fixed: `[D, V]`, the token that a deterministic drafter proposes there; `[D, V, W]`, one for
        each of W siblings.
      num_drafted: nodes drafted in the first round and in later ones.
      num_nodes: N, nodes that a draft has room for.
      min_confidence: after the first token less likely than this under q, a draft ends.
      parents: of a tree's nodes, whose siblings are drawn without replacement; None is a chain, by
        the production drafter and through the code for chains.
      holes: nodes of a tree that no token was found for.
      params: the request's, of which `logit_bias` and `allowed_token_ids` are used.
    """

    p: np.ndarray
    q: np.ndarray | None = None
    fixed: np.ndarray | None = None
    num_drafted: tuple[int, int]
    num_nodes: int = 3
    min_confidence: float = 0.0
    parents: tuple[int, ...] | None = None
    holes: tuple[int, ...] = ()
    params: SamplingParams | None = None

    @property
    def biased_p(self) -> np.ndarray:
        """`[D, V, V]`, the distribution that the request is to be drawn from."""
        return biased(self.p, self.params)

    @property
    def vocab_size(self) -> int:
        return self.p.shape[-1]

    @property
    def tree(self) -> np.ndarray:
        """`[N]`, parents of the nodes."""
        return np.arange(self.num_nodes) - 1 if self.parents is None else np.array(self.parents)

    @property
    def depths(self) -> np.ndarray:
        """`[N + 1]`, of the root and of each node."""
        depths = [0]
        for parent in self.tree:
            depths.append(1 + depths[parent + 1])
        return np.array(depths)

    @property
    def longest(self) -> int:
        """Tokens that a round emits at most."""
        return int(self.depths.max()) + 1

    @property
    def families(self) -> list[tuple[int, list[int]]]:
        """Each node with children (-1 is the root), and these, holes left out."""
        children = {
            parent: [n for n in np.flatnonzero(self.tree == parent) if n not in self.holes]
            for parent in range(-1, self.num_nodes)
        }
        return [(parent, nodes) for parent, nodes in children.items() if nodes]


def random_distributions(seed, *, size=V, depth=DEPTH, sharpness=0.6) -> np.ndarray:
    """`[D, V, V]`, random ones."""
    return np.random.default_rng(seed).dirichlet(np.full(size, sharpness), (depth, size))


def one_hot(seed) -> np.ndarray:
    """`[D, V, V]`, of one token each."""
    return np.eye(V)[np.random.default_rng(seed).integers(0, V, (DEPTH, V))]


def thinned(distributions, seed) -> np.ndarray:
    """The distributions with a zero entry in each."""
    zeros = np.eye(V)[np.random.default_rng(seed).integers(0, V, distributions.shape[:2])]
    distributions = np.where(zeros == 1, 0, distributions)
    return distributions / distributions.sum(-1, keepdims=True)


def position_keys_only(rows, node, stream):
    """A fault of `sampling.round_keys`: a round's noise by position, so what one round drew and did
    not use, the next draws again."""
    position = rows.num_committed[:, None] + node
    keys = sampling.position_keys(rows.sampling, position)
    return jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, stream)))(keys)


def biased(p: np.ndarray, params: SamplingParams | None) -> np.ndarray:
    """Distributions `[..., V]` after the biases of a request."""
    if params is None:
        return p
    size = p.shape[-1]
    allowed = range(size) if params.allowed_token_ids is None else params.allowed_token_ids
    factor = np.array([np.exp(dict(params.logit_bias).get(token, 0)) for token in range(size)])
    factor = np.where(np.isin(np.arange(size), allowed), factor, 0)
    weights = p * factor
    weights = np.where(weights.sum(-1, keepdims=True) > 0, weights, factor)
    return weights / weights.sum(-1, keepdims=True)


def make_rows(num_committed, *, keys=None, temperature=1.0, params=None) -> BatchView:
    """Rows of one request (or of one key `[B, 2]` each) at several lengths, with the biases of
    `params`."""
    num_rows = len(num_committed)

    def fill(value, dtype):
        return jnp.full((num_rows,), value, dtype)

    if keys is None:
        keys = np.tile(sampling.request_key(5), (num_rows, 1))
    num_committed = jnp.asarray(num_committed, jnp.int32)
    bias = None
    if params is not None:
        one = params.of_row(prompt_length=PROMPT_LENGTH).bias
        bias = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows, *np.shape(x))), one)
    return BatchView(
        tokens=jnp.zeros((num_rows, 32), jnp.int32),
        num_committed=num_committed,
        draft_limit=fill(8, jnp.int32),
        stop_tokens=jnp.full((num_rows, 1), -1, jnp.int32),
        sampling=neutral_sampling(num_rows).replace(
            temperature=jnp.broadcast_to(jnp.float32(temperature), (num_rows,)),
            key=jnp.asarray(keys),
            prompt_length=fill(PROMPT_LENGTH, jnp.int32),
            bias=bias,
        ),
    )


def log(distribution: np.ndarray) -> np.ndarray:
    """fp32 logits of a distribution; -inf where it is zero."""
    with np.errstate(divide="ignore"):
        return np.log(distribution).astype(np.float32)


def raw(key_data) -> np.ndarray:
    """One integer per key."""
    data = key_data.astype(np.uint64)
    return data[..., 0] << np.uint64(32) | data[..., 1]


class Bench:
    """A verifier and `draw_draft`, compiled with their randomness replaced by given draws.

    A bench traces what stands in `jaxspec` when it is first used: make a new one for code that has
    been changed.
    """

    def __init__(self, verifier):
        self.verifier = verifier
        self.seen: dict[str, np.ndarray] = {}
        self._verify, self._draw = jax.jit(self._traced_verify), jax.jit(self._traced_draw)

    def verify(self, logits, draft, rows, draws) -> tuple[np.ndarray, dict]:
        """Accepted paths `[B, D]` for acceptance draws `[B, N]`; and the keys `accept` and `next`
        asked for, with the weights that the next token is drawn from."""
        self.seen = {}
        path = np.asarray(self._verify(logits, draft, rows, draws))
        jax.effects_barrier()
        return path, self.seen

    def draw(self, logits, rows, drafted, node) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The key `[B]` that a draft is drawn with, the distribution `[B, V]` it reports, and the
        confidence `[B]` in the node's token in `drafted`."""
        self.seen = {}
        distribution, confidence = map(np.asarray, self._draw(logits, rows, drafted, node))
        jax.effects_barrier()
        return self.seen["draft"], distribution, confidence

    def _record(self, name, values):
        def keep(values):
            self.seen[name] = np.asarray(values)

        io_callback(keep, None, values, ordered=True)

    def _traced_verify(self, logits, draft, rows, draws):
        def uniform(keys):
            self._record("accept", jax.random.key_data(keys))
            return draws

        def draw_weighted(keys, weights):
            self._record("next", jax.random.key_data(keys))
            self._record("weights", weights)
            return jnp.zeros(keys.shape, jnp.int32)

        prefix = sampling.chain_prefix(rows, draft.tokens)
        with replaced(uniform=uniform, draw_weighted=draw_weighted):
            return self.verifier.verify(logits, draft, rows, prefix).path

    def _traced_draw(self, logits, rows, drafted, node):
        def gumbel(keys, vocab_size):
            self._record("draft", jax.random.key_data(keys)[:, 0])
            drawn = jnp.take(drafted, node, axis=1)[:, None]
            return 1e6 * jax.nn.one_hot(drawn, vocab_size)  # noise that draws the case's token

        with replaced(gumbel=gumbel):
            drawn = sampling.draw_draft(
                logits,
                rows,
                drafted,
                node,
                vocab_size=logits.shape[1],
                is_noise_shared=self.verifier.is_noise_shared,
                needs_probs=True,
                needs_confidence=True,
            )
            return drawn.distribution, drawn.confidence


@contextlib.contextmanager
def replaced(**functions):
    """`jaxspec.sampling` with some functions replaced."""
    with pytest.MonkeyPatch.context() as patch:
        for name, function in functions.items():
            patch.setattr(sampling, name, function)
        yield


# What one round decides, in every case it can meet.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decisions:
    """Of M cases (start, last token, drafts), with C = 2**N outcomes of the acceptance draws.

    Attributes:
      index: `{(emitted, last token, drafts): m}`.
      draft_keys, draft_probs: `[M, G]`, and for each of the G families `[M, V ** W]`, the
        probabilities of its W siblings; None for deterministic drafts.
      accept_keys, thresholds: `[M, N]`; a node passes where its draw is below its threshold.
      path: `[M, C, D]`; bit n of an outcome says that node n's draw passes.
      next_keys, next_weights: `[M, C]` and `[M, C, V]`, where the next token is drawn.
    """

    index: dict
    draft_keys: np.ndarray | None
    draft_probs: list[np.ndarray] | None
    accept_keys: np.ndarray
    thresholds: np.ndarray
    path: np.ndarray
    next_keys: np.ndarray
    next_weights: np.ndarray


class Round:
    """One round of a rule on many cases at once; draws of acceptance are given, not made."""

    def __init__(self, bench: Bench, case: Case, starts):
        size, num_nodes = case.vocab_size, case.num_nodes
        emitted, last, drafts = [], [], []
        for start, token in starts:
            for drafted in itertools.product(range(size), repeat=num_nodes):
                if not can_be_drafted(case, start, token, drafted):
                    continue
                emitted.append(start)
                last.append(token)
                drafts.append(drafted)
        self.bench, self.case, self.num_nodes = bench, case, num_nodes
        self.emitted, self.last = np.array(emitted), np.array(last)
        self.drafts = np.array(drafts)
        first, later = case.num_drafted
        self.num_valid = np.where(self.emitted == 0, first, later)
        context = np.concatenate([self.last[:, None], self.drafts], axis=1)
        depth = self.emitted[:, None] + case.depths
        above = case.tree + 1
        self.p = case.p[depth, context]
        self.q = None if case.q is None else case.q[depth[:, above], context[:, above]]
        self.is_hole = np.isin(np.arange(num_nodes), case.holes)[None]

    def draft(self):
        """Keys `[M, G]` and probabilities of the families, and the distributions `[M, N, V]` that
        are handed over with the draft."""
        if self.case.parents is None:
            return self.draft_chain()
        distributions = self.q.astype(np.float32)
        keys, of_families = [], []
        for parent, nodes in self.case.families:
            node = jnp.full((len(self.drafts), 1), parent + 1, jnp.int32)
            rows = make_rows(PROMPT_LENGTH + self.emitted)
            key = sampling.round_keys(rows, node, sampling.Stream.DRAFT)
            keys.append(raw(np.asarray(jax.random.key_data(key))[:, 0]))
            q = distributions[:, nodes[0]].astype(np.float64)
            of_families.append(sibling_probs(q, len(nodes)))
        of_token = np.take_along_axis(distributions, self.drafts[..., None], axis=2)[..., 0]
        self.is_hole = self.is_hole | is_left_out(self.case, of_token)
        return np.stack(keys, 1), of_families, distributions

    def draft_chain(self):
        """As `draw_draft` reports them; drafts are ended where its confidence says so."""
        keys, distributions = [], []
        for node in range(self.num_nodes):
            key, distribution, confidence = self.bench.draw(
                jnp.asarray(log(self.q[:, node])),
                make_rows(PROMPT_LENGTH + self.emitted, params=self.case.params),
                jnp.asarray(self.drafts, jnp.int32),
                jnp.int32(node),
            )
            keys.append(raw(key))
            distributions.append(distribution)
            is_sure = confidence >= self.case.min_confidence
            self.num_valid = draft_model.end_draft(self.num_valid, node, is_sure=is_sure)
        self.num_valid = np.asarray(self.num_valid)
        of_families = [distribution.astype(np.float64) for distribution in distributions]
        return np.stack(keys, 1), of_families, np.stack(distributions, 1)

    def decide(self, distributions, draws):
        """What the rule makes of acceptance draws `[k, M, N]`: keys, paths and weights, each
        `[k, M, ...]`. It is always run on as many, so that it is compiled once."""
        case, asked = self.case, len(draws)
        times = max(NUM_STEPS * self.num_nodes, 2**self.num_nodes + 2)

        def each(values):
            return jnp.asarray(np.tile(values, (times, *[1] * (np.ndim(values) - 1))))

        tokens = each(np.where(self.is_hole, -1, self.drafts).astype(np.int32))
        draft = Draft(
            tokens=tokens,
            parents=jnp.broadcast_to(jnp.asarray(case.tree, jnp.int32), tokens.shape),
            num_valid=each(self.num_valid.astype(np.int32)),
            q=None if distributions is None else each(distributions),
            max_depth=case.longest - 1,
            is_chain=case.parents is None,
        )
        rows = make_rows(np.tile(PROMPT_LENGTH + self.emitted, times), params=case.params)
        draws = np.resize(draws, (times, *draws.shape[1:])).reshape(-1, self.num_nodes)
        path, seen = self.bench.verify(
            each(log(self.p)), draft, rows, jnp.asarray(draws, jnp.float32)
        )
        found = {
            "path": path,
            "accept_keys": raw(seen["accept"]),
            "next_keys": raw(seen["next"]),
            "next_weights": seen["weights"].astype(np.float64),
        }
        return {
            name: values.reshape(times, -1, *values.shape[1:])[:asked]
            for name, values in found.items()
        }

    def thresholds(self, distributions) -> np.ndarray:
        """Draw `[M, N]` below which each node passes: while the nodes above it pass and all others
        fail, a search finds where it is no longer on the accepted path."""
        num_rows, num_nodes = self.drafts.shape
        low, width = np.zeros((num_nodes, num_rows)), 1.0
        grid = np.arange(NUM_STEPS) / NUM_STEPS
        for _ in range(NUM_REFINEMENTS):
            draws = np.full((NUM_STEPS, num_nodes, num_rows, num_nodes), LARGEST_DRAW)
            for node in range(num_nodes):
                above = self.case.tree[node]
                while above >= 0:
                    draws[:, node, :, above] = 0
                    above = self.case.tree[above]
                draws[:, node, :, node] = low[node] + width * grid[:, None]
            found = self.decide(distributions, draws.reshape(-1, num_rows, num_nodes))["path"]
            found = found.reshape(NUM_STEPS, num_nodes, num_rows, -1)
            passes = np.any(found == np.arange(num_nodes)[:, None, None], axis=3)
            assert np.all(np.diff(passes.astype(int), axis=0) <= 0)  # a smaller draw passes sooner
            width /= NUM_STEPS
            low += width * np.maximum(np.sum(passes, axis=0) - 1, 0)
        exact = (low + width / 2).T
        return np.where(exact < NEVER, 0, np.where(exact > 1 - NEVER, 1, exact))

    def run(self) -> Decisions:
        keys, of_families, distributions = (None, None, None) if self.q is None else self.draft()
        thresholds = self.thresholds(distributions)
        bits = np.arange(2**self.num_nodes)[:, None] >> np.arange(self.num_nodes) & 1
        inside = np.where(bits[:, None] == 1, thresholds / 2, (1 + thresholds) / 2)
        # Random draws besides: the cells between thresholds are all there is.
        random = np.random.default_rng(0).random((2, *thresholds.shape))
        seen = self.decide(
            distributions, np.minimum(np.concatenate([inside, random]), LARGEST_DRAW)
        )
        found = seen["path"][-2:]
        cell = (random < thresholds) @ (1 << np.arange(self.num_nodes))
        expected = np.take_along_axis(seen["path"], cell[..., None], axis=0)
        is_clear = np.all(np.abs(random - thresholds) > 1e-6, axis=2)
        np.testing.assert_array_equal(found[is_clear], expected[is_clear])

        cases = zip(self.emitted.tolist(), self.last.tolist(), self.drafts.tolist(), strict=True)
        return Decisions(
            index={(e, t, tuple(drafted)): m for m, (e, t, drafted) in enumerate(cases)},
            draft_keys=keys,
            draft_probs=of_families,
            accept_keys=seen["accept_keys"][0],
            thresholds=thresholds,
            path=seen["path"][:-2].swapaxes(0, 1),
            next_keys=seen["next_keys"][:-2].swapaxes(0, 1),
            next_weights=seen["next_weights"][:-2].swapaxes(0, 1),
        )


def can_be_drafted(case: Case, emitted: int, last: int, drafted: tuple[int, ...]) -> bool:
    """Whether a drafter may come to propose these tokens; holes count as token 0."""
    if any(drafted[node] for node in case.holes):
        return False
    if case.fixed is None:
        families = [[drafted[node] for node in nodes] for _, nodes in case.families]
        return all(len(set(tokens)) == len(tokens) for tokens in families)
    tokens, fixed = (last, *drafted), np.atleast_3d(case.fixed)
    return all(
        drafted[node] == fixed[emitted + case.depths[parent + 1], tokens[parent + 1], rank]
        for parent, nodes in case.families
        for rank, node in enumerate(nodes)
    )


def sibling_probs(q: np.ndarray, number: int) -> np.ndarray:
    """Probabilities `[M, V ** number]` of tokens drawn from `q` `[M, V]` one after the other,
    without replacement; when none is left that q can draw, the first untaken one stands there."""
    size, found = q.shape[1], []
    for tokens in itertools.product(range(size), repeat=number):
        chance, left, untaken = np.ones(len(q)), q.copy(), list(range(size))
        for token in tokens:
            total = left.sum(axis=1)
            with np.errstate(invalid="ignore"):
                drawn = left[:, token] / total
            chance = chance * np.where(total > 0, drawn, float(untaken[:1] == [token]))
            left[:, token] = 0
            untaken = [other for other in untaken if other != token]
        found.append(chance)
    return np.stack(found, axis=1)


def is_left_out(case: Case, of_token: np.ndarray) -> np.ndarray:
    """`[M, N]` bool, which nodes of a tree the drafter leaves out, given q of each one's token."""
    return np.zeros(of_token.shape, bool)


def decide(bench: Bench, case: Case, *, num_rounds: int = 2) -> Decisions:
    """What production decides in every case that `num_rounds` rounds can meet."""
    longest = (num_rounds - 1) * case.longest
    starts = [(n, last) for n in range(1, longest + 1) for last in range(case.vocab_size)]
    return Round(bench, case, [(0, 0), *starts]).run()


# The distribution over rounds.


@dataclasses.dataclass
class Paths:
    """Ways the rounds can go: emitted tokens, probability, and what is known of noise that is used
    again: the interval in which each such symbol lies."""

    tokens: np.ndarray  # [M, most]
    length: np.ndarray  # [M]
    weight: np.ndarray  # [M]
    low: np.ndarray  # [M, K]
    high: np.ndarray  # [M, K]

    def take(self, index) -> Paths:
        return Paths(**{f.name: getattr(self, f.name)[index] for f in dataclasses.fields(self)})

    def split(self, column, cuts) -> tuple[Paths, np.ndarray, np.ndarray]:
        """Paths by the cell `cuts` `[M, C + 1]` that a symbol falls into; `column` is -1 for a
        symbol that is used nowhere else. Returns paths, parents, cells."""
        num_cells = cuts.shape[1] - 1
        parent = np.repeat(np.arange(len(self.weight)), num_cells)
        cell = np.tile(np.arange(num_cells), len(self.weight))
        low, high = cuts[parent, cell], cuts[parent, cell + 1]
        column = column[parent]
        is_known = column >= 0
        known = np.maximum(column, 0)
        paths = self.take(parent)
        if paths.low.shape[1]:
            row = np.arange(len(parent))
            low = np.where(is_known, np.maximum(low, paths.low[row, known]), low)
            high = np.where(is_known, np.minimum(high, paths.high[row, known]), high)
            at = np.flatnonzero(is_known)
            paths.low[at, known[at]], paths.high[at, known[at]] = low[at], high[at]
        kept = high - low > 1e-12
        paths.weight = np.where(is_known, paths.weight, paths.weight * np.maximum(high - low, 0))
        return paths.take(kept), parent[kept], cell[kept]

    def merged(self) -> Paths:
        """Paths that agree in all but their weight, as one."""
        columns = (self.tokens, self.length[:, None], self.low, self.high)
        _, first, number = np.unique(
            np.concatenate(columns, axis=1), axis=0, return_index=True, return_inverse=True
        )
        merged = self.take(first)
        merged.weight = np.bincount(number.reshape(-1), self.weight)
        return merged


def output_probs(bench: Bench, case: Case, *, num_rounds: int = 2):
    """Distribution `[V ** n]` of the first `n = num_rounds (D + 1)` tokens, as `sequence_probs`
    orders them.

    What is still missing after `num_rounds` rounds is completed by the target itself.
    """
    num_nodes = case.num_nodes
    size, most = case.vocab_size, num_rounds * case.longest
    decisions = decide(bench, case, num_rounds=num_rounds)
    columns, matters = remembered(decisions), what_matters(decisions)

    def column(keys):
        return np.vectorize(lambda key: columns.get(int(key), -1), otypes=[int])(keys)

    accept_column, next_column = column(decisions.accept_keys), column(decisions.next_keys)
    draft_column = None if decisions.draft_keys is None else column(decisions.draft_keys)
    paths = Paths(
        tokens=np.zeros((1, most), int),
        length=np.zeros(1, int),
        weight=np.ones(1),
        low=np.zeros((1, len(columns))),
        high=np.ones((1, len(columns))),
    )
    # Case numbers, by start and drafts as digits; unknown drafts do not matter for a node's
    # distribution.
    number = np.full((most, size, size**num_nodes), -1)
    digits = size ** np.arange(num_nodes - 1, -1, -1)
    if draft_column is not None:
        for (emitted, last, drafts), m in decisions.index.items():
            code = 0
            for _, nodes in case.families:
                if number[emitted, last, code] < 0:
                    number[emitted, last, code] = m
                code += sum(drafts[node] * digits[node] for node in nodes)
    for (emitted, last, drafts), m in decisions.index.items():
        number[emitted, last, np.dot(drafts, digits)] = m

    for _ in range(num_rounds):
        last = np.where(
            paths.length > 0,
            paths.tokens[np.arange(len(paths.weight)), np.maximum(paths.length - 1, 0)],
            0,
        )
        drafts = np.zeros(len(last), int)
        if draft_column is None:
            table = number[paths.length, last]
            drafts = np.argmax(table >= 0, axis=1)
        else:
            for family, (_, nodes) in enumerate(case.families):
                at = number[paths.length, last, drafts]
                cuts = cuts_of(decisions.draft_probs[family][at])
                paths, parent, tokens = paths.split(draft_column[at, family], cuts)
                last, drafts = last[parent], drafts[parent]
                for rank, node in enumerate(reversed(nodes)):
                    drafts = drafts + tokens // size**rank % size * digits[node]
        at = number[paths.length, last, drafts]
        outcome = np.zeros(len(at), int)
        for node in range(num_nodes):
            is_looked_at = matters[node][at, outcome]
            threshold = np.where(is_looked_at, decisions.thresholds[at, node], 0)
            cuts = np.stack([np.zeros_like(threshold), threshold, np.ones_like(threshold)], 1)
            paths, parent, cell = paths.split(accept_column[at, node], cuts)
            at, drafts = at[parent], drafts[parent]
            outcome = outcome[parent] + ((cell == 0) << node)
        path = decisions.path[at, outcome]
        weights = decisions.next_weights[at, outcome]
        paths, parent, token = paths.split(
            next_column[at, outcome], cuts_of(weights / weights.sum(1, keepdims=True))
        )
        path, drafts, row = path[parent], drafts[parent], np.arange(len(parent))
        for depth, node in enumerate(path.T):
            taken = node >= 0
            drafted = drafts // digits[node] % size
            paths.tokens[row[taken], paths.length[taken] + depth] = drafted[taken]
        num_accepted = np.sum(path >= 0, axis=1)
        paths.tokens[row, paths.length + num_accepted] = token
        paths.length = paths.length + num_accepted + 1
        paths = paths.merged()

    weight = paths.weight * np.prod(paths.high - paths.low, axis=1)
    emitted = [np.zeros(size**n) for n in range(most + 1)]
    for n in range(1, most + 1):
        here = paths.length == n
        code = paths.tokens[here, :n] @ (size ** np.arange(n - 1, -1, -1))
        np.add.at(emitted[n], code, weight[here])
    return complete(emitted, case.biased_p)


def what_matters(decisions: Decisions) -> list[np.ndarray]:
    """For each node n `[M, 2 ** n]` bool: whether its draw is looked at, by the outcome of those
    before it."""
    num_cases, num_outcomes, _ = decisions.path.shape
    case = np.broadcast_to(np.arange(num_cases)[:, None, None], (num_cases, num_outcomes, 1))
    results = np.concatenate([case, decisions.path, decisions.next_weights], axis=2)
    results = results.reshape(num_cases * num_outcomes, -1)
    _, number = np.unique(results, axis=0, return_inverse=True)
    found = []
    for node in range(num_outcomes.bit_length() - 1):
        by_bit = number.reshape(num_cases, -1, 2, 2**node)
        found.append(np.any(by_bit[:, :, 0] != by_bit[:, :, 1], axis=1))
    return found


def cuts_of(distribution: np.ndarray) -> np.ndarray:
    """Where `[0, 1]` is cut to draw from distributions `[M, V]`, `[M, V + 1]`."""
    total = np.cumsum(distribution, axis=1)
    total = total / total[:, -1:]
    return np.concatenate([np.zeros((len(distribution), 1)), total], axis=1)


def remembered(decisions: Decisions) -> dict[int, int]:
    """Keys that are asked for in more than one place along a path, numbered.

    A place is a start length, a purpose and a node (a family, of drafts); at one start, a key may
    serve one place only.
    """
    places: dict[int, set] = {}
    starts = [start for start, _, _ in decisions.index]
    groups = [("accept", decisions.accept_keys), ("next", None)]
    if decisions.draft_keys is not None:
        groups.append(("draft", decisions.draft_keys))
    for purpose, keys in groups:
        for m, start in enumerate(starts):
            if keys is not None:
                for node, key in enumerate(keys[m]):
                    places.setdefault(int(key), set()).add((start, purpose, node))
            else:
                last = decisions.path[m].max(axis=1, initial=-1)
                for key, node in zip(decisions.next_keys[m], last, strict=True):
                    places.setdefault(int(key), set()).add((start, purpose, int(node)))
    used_twice = [key for key, found in places.items() if len(found) > 1]
    return {key: number for number, key in enumerate(used_twice)}


def complete(emitted, p) -> np.ndarray:
    """Distribution of the longest sequences, given the mass `emitted[n]` `[V ** n]` that ends after
    n
    tokens: the target goes on from there."""
    size = p.shape[-1]
    going = emitted[0]
    for n in range(1, len(emitted)):
        last = np.arange(len(going)) % size if n > 1 else np.zeros(1, int)
        going = (going[:, None] * p[n - 1, last]).reshape(-1) + emitted[n]
    return going


def sequence_probs(p: np.ndarray, length: int) -> np.ndarray:
    """The target's own distribution of `length` tokens."""
    return complete([np.ones(1)] + [np.zeros(p.shape[-1] ** n) for n in range(1, length + 1)], p)


def probs_error(bench: Bench, case: Case, *, num_rounds: int = 2) -> float:
    """Largest difference between the output's distribution and the target's."""
    found = output_probs(bench, case, num_rounds=num_rounds)
    length = num_rounds * case.longest
    return float(np.abs(found - sequence_probs(case.biased_p, length)).max())


def expected_accepted(bench: Bench, case: Case) -> float:
    """Expected accepted tokens of a first round, from the production decisions."""
    num_nodes, total = case.num_nodes, 0.0
    decisions = decide(bench, case, num_rounds=1)
    for (_, _, drafts), m in decisions.index.items():
        weight = 1.0
        if decisions.draft_probs is not None:
            for probs, (_, nodes) in zip(decisions.draft_probs, case.families, strict=True):
                code = 0
                for node in nodes:
                    code = code * case.vocab_size + drafts[node]
                weight *= probs[m, code]
        thresholds = decisions.thresholds[m]
        for outcome, num_accepted in enumerate(np.sum(decisions.path[m] >= 0, axis=1)):
            bits = outcome >> np.arange(num_nodes) & 1
            chance = np.prod(np.where(bits, thresholds, 1 - thresholds))
            total += weight * chance * num_accepted
    return float(total)
