"""A draft model that keeps a window of its KV: what it drafts, and that no output depends on it."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from door import Untapped
from live import live_kv, poison

from jaxspec import DraftModel, Engine, NGram, Rejection, SamplingParams, Static
from jaxspec.cache import pages as kv
from jaxspec.drafters import draft_model
from jaxspec.engine.adaptive import DraftLengthController
from jaxspec.engine.config import EngineConfig, make_parts
from jaxspec.engine.executor import make_executor
from jaxspec.engine.memory import num_bytes, window_break_even
from jaxspec.engine.round_times import PLAIN, RoundKind, RoundTimes
from jaxspec.engine.row_store import RowStore
from jaxspec.errors import SettingError
from jaxspec.kernels.base import attention_inputs
from jaxspec.kernels.registry import default_kernels
from jaxspec.models import decoder, layers, prefill
from jaxspec.models.config import RopeConfig
from jaxspec.models.registry import PRESETS
from jaxspec.models.shapes import shape_model
from jaxspec.requests.requests import make_requests
from jaxspec.serving import ServingEngine
from jaxspec.testing import check_drafter
from jaxspec.trees import BeamTree, StaticTree

WINDOW, SINKS, CHUNK, MAX_LENGTH = 128, 4, prefill.CHUNK, 768
# Two pages take turns, so a turn is 256 positions.
SHAPE = {
    "draft_length": 4,
    "batch_size": 3,
    "max_length": MAX_LENGTH,
}
PROMPTS = toy.prompts((600, 5, 290))
BEAM = BeamTree(width=2, depth=3, nodes=4)
STATIC = StaticTree(((0,), (1,), (0, 0), (0, 0, 0)))


@functools.cache
def models():
    """A target, and a draft model that agrees with it often enough; one of its layers has a sliding
    window of its own, one has not."""
    target = toy.model(num_layers=2)
    config = dataclasses.replace(target.config, sliding_windows=(100, None))
    return target, dataclasses.replace(target, name="draft", config=config)


def windowed(**settings):
    return DraftModel(models()[1], kv_window=WINDOW, kv_sinks=SINKS, **settings)


def params_of(temperatures=(0, 0.8, 0), max_tokens=60):
    return [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        for seed, temperature in enumerate(temperatures)
    ]


def executor_of(drafter, **settings):
    settings = SHAPE | settings
    return make_executor(models()[0], drafter, scheduler=Static(), trace="tokens", **settings)


def requests_of(prompts, params):
    return make_requests(prompts, params, models()[0], longest=MAX_LENGTH - 100)


def drafts_of(executor, row):
    """What was drafted for a row: by the length of its context, the tokens and their log q (that of
    holes in trees, which is NaN, as infinity)."""
    state = executor.fetch("trace", "counts")
    rounds, tokens = state.trace.rounds, state.trace.tokens
    found = {}
    for index in range(int(state.counts.num_rounds[row])):
        num_drafted = int(rounds.drafted[row, index])
        ids = tokens.token_id[row, index, 1 : num_drafted + 1]
        log_q = np.where(ids < 0, np.inf, tokens.logprob_q[row, index, 1 : num_drafted + 1])
        found[int(rounds.context_length[row, index])] = ids.tolist(), log_q.tolist()
    return found


def run(executor, requests, *, is_poisoned=False):
    """Decodes requests, by row; returns what was drafted for each. With NaN, if that is wanted,
    before every round wherever no query of the draft model may look."""
    for row, request in requests.items():
        executor.admit_and_prefill(row, request, draft_length=4, arrival=row)
    spoil = jax.jit(kv.poison_uncommitted)
    while is_poisoned and np.any(executor.fetch("finish").finish == 0):
        drafter = executor.state.drafter
        spoilt = drafter.replace(cache=spoil(drafter.cache, drafter.num_seen))
        executor.state = executor.state.replace(drafter=spoilt)
        executor.run(1)
    executor.run(MAX_LENGTH)
    return {row: drafts_of(executor, row) for row in requests}


@contextlib.contextmanager
def with_pages(monkeypatch, more):
    """Rings of so many more pages than they need; of very many, nothing takes turns, and the cache
    is a full one that is masked in the same way."""
    real = kv.Ring.of_calls

    def of_calls(**settings):
        ring = real(**settings)
        return dataclasses.replace(ring, num_pages=ring.num_pages + more)

    with monkeypatch.context() as patch:
        patch.setattr(draft_model.Ring, "of_calls", of_calls)
        yield


# What does not change


@pytest.mark.parametrize("kernels", ["default", pytest.param("xla", marks=pytest.mark.slow)])
def test_the_output_is_plain_decodings_over_several_turns_of_the_ring(kernels):
    """Tokens and KV to the bit, of greedy and sampled rows."""
    rope = RopeConfig(theta=1e4, rotary_size=16)
    changes = {"head_size": 16, "rope": rope, "num_layers": 1}
    name = "xla" if kernels == "xla" else default_kernels()
    target = toy.model(kernels=name, **changes)
    close = toy.model(kernels=name, **changes, sliding_windows=(200,))
    drafter = DraftModel(close, kv_window=WINDOW)
    engine = Engine(target, drafter, scheduler=Static(), **SHAPE)
    prompts, params = toy.prompts((480, 100, 290)), params_of(max_tokens=256)
    plain = engine.generate(prompts, params, speculate=False)
    plain_kv = live_kv(engine)
    poison(engine)
    speculative = engine.generate(prompts, params)
    assert [done.token_ids for done in speculative] == [done.token_ids for done in plain]
    for ours, theirs in zip(live_kv(engine), plain_kv, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for done in speculative:
        assert done.acceptance.num_accepted_tokens > 30


@pytest.mark.slow
def test_the_whole_battery():
    """Drafts depend on their own request only, and q is what they were drawn from; prompts that are
    longer than a turn of the ring, and shorter."""
    target = models()[0]
    prompts = toy.prompts((1, 300, 129, 2, 420, 40, 600, 257, 500))
    for drafter in (windowed(), windowed(tree=BEAM)):
        check_drafter(drafter, target, prompts=prompts, max_length=768).assert_ok()


# What is drafted


def visible(own, num_tokens):
    """`[T, T]`, which positions (columns) a query (row) of a layer sees."""
    query, key = np.ogrid[:num_tokens, :num_tokens]
    near = key > query - (WINDOW if own is None else min(own, WINDOW))
    is_near = near | (key < SINKS) if own is None or own > WINDOW else near
    return (key <= query) & is_near


@functools.cache
def dense_logits():
    """A function of `[MAX_LENGTH]` tokens: logits `[MAX_LENGTH, V]` of the draft model, nothing
    cached."""
    model = models()[1]
    config = model.config

    @jax.jit
    def logits(tokens):
        hidden = decoder.embed(model.params, tokens[None])
        positions = jnp.arange(MAX_LENGTH, dtype=jnp.int32)[None]
        angles = layers.rotary_angles(config.rope, positions)
        for index, layer in enumerate(model.params["layers"]):
            mask = jnp.asarray(visible(config.sliding_window(index), MAX_LENGTH))

            def attend(qkv, layer=layer, mask=mask):
                inputs = attention_inputs(qkv, angles, **layers.attention_settings(config, layer))
                return jax.nn.dot_product_attention(*inputs, mask=mask[None, None])

            hidden = layers.decoder_layer(config, layer, hidden, attend)
        return decoder.head(config, model.params, hidden)[0]

    return logits


def distances_to_dense(executor, drafts):
    """By row, the largest difference between log q of what was drafted and that of a dense
    reference, in the row's temperature (1 if it is greedy); and whether each greedy draft is the
    likeliest token."""
    tokens = executor.fetch("tokens").tokens
    for row, by_context in drafts.items():
        temperature = (1.0, 0.8, 1.0)[row]
        farthest, are_likeliest = 0.0, []
        for context, (drafted, logprobs) in [*by_context.items()][::4]:
            text = np.zeros((MAX_LENGTH,), np.int32)
            text[:context] = tokens[row, :context]
            text[context : context + len(drafted)] = drafted
            logits = dense_logits()(text)[context - 1 : context - 1 + len(drafted)]
            expected = np.asarray(jax.nn.log_softmax(logits / temperature))
            of_drafts = expected[np.arange(len(drafted)), drafted]
            farthest = max([farthest, *np.abs(of_drafts - logprobs)])
            are_likeliest.append(expected.argmax(axis=1).tolist() == drafted)
        yield row, farthest, all(are_likeliest)


@pytest.mark.parametrize("is_broken", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drafts_are_drawn_from_what_a_dense_reference_says(monkeypatch, is_broken):
    """Under `rejection`, where the output's distribution rests on q. A ring of one page less is
    seen."""
    drafter = windowed()
    with with_pages(monkeypatch, -1 if is_broken else 0):
        executor = executor_of(drafter, verifier=Rejection())
        drafts = run(executor, dict(enumerate(requests_of(PROMPTS, params_of()))))
    found = list(distances_to_dense(executor, drafts))
    is_close = [farthest < 1e-3 for _, farthest, _ in found]
    # Row 1 has 65 tokens, and no page that takes turns.
    assert is_close == ([False, True, False] if is_broken else [True] * 3)
    is_greedy_right = [is_right for row, _, is_right in found if row != 1]
    assert all(is_greedy_right) != is_broken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "verifier"),
    [
        pytest.param({"min_confidence": 0.1}, None, marks=pytest.mark.slow),
        ({"tree": BEAM}, None),
        pytest.param({"tree": STATIC}, Rejection(), marks=pytest.mark.slow),
    ],
    ids=["chains that end early", "beam tree", "static tree"],
)
def test_drafts_are_those_of_a_full_cache_that_is_masked_alike(monkeypatch, settings, verifier):
    """To the bit, and whatever is in the slots that no query may see."""
    drafter, requests = windowed(**settings), dict(enumerate(requests_of(PROMPTS, params_of())))
    executor = executor_of(drafter, verifier=verifier)
    found = run(executor, requests)
    assert run(executor, requests, is_poisoned=True) == found
    assert run(executor, {2: requests[2]})[2] == found[2]
    for more, is_same in ((20, True), (-1, False)):
        with with_pages(monkeypatch, more):
            others = run(executor_of(drafter, verifier=verifier), requests)
        assert (others == found) == is_same


@pytest.mark.slow
def test_a_window_of_kv_may_be_narrower_than_what_a_round_scores(monkeypatch):
    """The ring has room for both; one that had it for `kv_window` alone is seen."""
    [request] = requests_of([PROMPTS[2]], SamplingParams(max_tokens=180))
    found = {}
    for more in (0, 20, -2):
        with with_pages(monkeypatch, more):
            executor = executor_of(windowed(), draft_length=WINDOW + 20, batch_size=1)
            executor.admit_and_prefill(0, request, draft_length=WINDOW + 20)
            executor.run(6)  # the first drafts are the longest
        found[more] = drafts_of(executor, 0)
    assert max(len(tokens) for tokens, _ in found[0].values()) > WINDOW
    assert found[0] == found[20] != found[-2]


# Rows that rest, move and return


@pytest.mark.slow
def test_a_drafter_that_fell_behind_catches_up_over_turns_of_the_ring():
    """It drafts what it would have drafted for the same text as a prompt."""
    [request] = requests_of([PROMPTS[2]], SamplingParams(max_tokens=400))
    executor = executor_of(windowed())
    executor.admit_and_prefill(1, request, draft_length=0)
    executor.run(300)
    executor.set_draft_limits([4, 4, 4])
    lag = int(executor.lags()[1])
    assert lag == 300
    assert executor.catch_up({1: lag}) == -(-300 // CHUNK)
    executor.run(20)
    late = {at: tokens for at, (tokens, _) in drafts_of(executor, 1).items() if tokens}
    text = executor.fetch("tokens").tokens[1, :590].tolist()
    [again] = requests_of([text], SamplingParams(max_tokens=110))
    early = run(executor, {0: again})[0]
    assert len(late) == 20
    for context, tokens in late.items():
        assert early[context][0] == tokens


def continued(executor, num_kept, params):
    """Drafts for a prompt that shares its first `num_kept` tokens with the one that row 0 has read,
    and the tokens of that one that the drafter did not read again."""
    [first] = requests_of([PROMPTS[0]], params)
    other = PROMPTS[0][:num_kept] + toy.prompts((40,), seed=5)[0]
    [second] = requests_of([other], params)
    executor.admit_and_prefill(0, first, draft_length=4)
    executor.run(3)
    RowStore(executor).continue_row(0, second, draft_length=4, num_kept=num_kept, start=num_kept)
    num_seen = int(executor.state.drafter.num_seen[0])
    for start in range(num_kept, len(other) - 1, CHUNK):
        executor.prefill([(0, start)])
    executor.catch_up({0: int(executor.lags()[0])})
    executor.run(20)
    return second, drafts_of(executor, 0), num_seen


@pytest.mark.slow
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_the_ring_has_lost_is_read_again(monkeypatch, is_broken):
    if is_broken:
        monkeypatch.setattr(kv.Ring, "holds", lambda ring, kept, written: kept >= 0)
    executor = executor_of(windowed())
    params = SamplingParams(max_tokens=30)
    kept, is_same = [], []
    for num_kept in (60, 128, 300, 470, 580):
        second, drafts, num_seen = continued(executor, num_kept, params)
        kept.append(num_seen)
        fresh = run(executor, {1: second})[1]
        is_same.append(all(fresh[at][0] == tokens for at, (tokens, _) in drafts.items()))
    if is_broken:
        assert kept == [60, 128, 300, 470, 580]
        assert not all(is_same)
    else:  # the first block has a page of its own; of the others, 128 positions before must be left
        assert kept == [60, 128, 0, 0, 580]
        assert all(is_same)


def test_cutting_back_twice_forgets_nothing_of_what_was_written():
    """What was written before the first cut is still in the ring's way at the second."""
    executor = executor_of(windowed())
    drafter, shape = executor.parts.drafter, executor.parts.resident_shape
    executor.admit_and_prefill(0, *requests_of([PROMPTS[0]], SamplingParams()), draft_length=4)
    state = executor.state.drafter
    for num_kept, expected in ((500, 500), (480, 480), (460, 0)):
        state = drafter.rewind(shape, (), state, None, 0, jnp.int32(num_kept))
        assert int(state.num_seen[0]) == expected, num_kept
    assert int(state.num_written[0]) == 0


def drafted(done):
    """Tokens, rounds and accepted tokens of a completion; the latter depend on every draft."""
    return done.token_ids, done.acceptance.num_rounds, done.acceptance.num_accepted_tokens


@pytest.mark.slow
def test_schedulers_do_not_change_what_is_drafted():
    """More requests than rows, some of which wait among the residents."""
    prompts, params = PROMPTS[::2] * 2, params_of((0, 0.8, 0, 0), max_tokens=40)
    found = []
    for scheduler, batch_size in (("static", 3), ("pool", 2), ("continuous", 2)):
        shape = SHAPE | {"batch_size": batch_size}
        engine = Engine(models()[0], windowed(), scheduler=scheduler, **shape)
        found.append([drafted(done) for done in engine.generate(prompts, params)])
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_sessions_that_are_parked_draft_as_from_nothing():
    """Two chats share one row, so that every turn finds its KV on the host."""
    engine = Engine(models()[0], windowed(), **{**SHAPE, "batch_size": 1})
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with engine.session() as one, engine.session() as other:
        for turn in (0, 1):
            for session, seed in ((one, 1), (other, 2)):
                new = toy.prompts((250 + 100 * turn,), seed=seed + 10 * turn)[0]
                done = session.generate([*session.token_ids, *new], params)
                if turn:
                    assert done.num_reused_tokens == 269
                [fresh] = engine.generate([done.prompt_token_ids], params)
                assert drafted(done) == drafted(fresh)


@pytest.mark.slow
def test_a_prefilled_row_may_be_inserted():
    engine = ServingEngine(models()[0], windowed(), **SHAPE)
    params = SamplingParams(max_tokens=30)
    state = engine.init_decode_state()
    state = engine.insert(engine.prefill(PROMPTS[0], params), state, 2)
    tokens, num_rounds = [], 0
    while len(tokens) < 30:
        state, result = engine.generate(state)
        tokens += np.asarray(result.tokens)[2, : int(result.num_new[2])].tolist()
        num_rounds += 1
    own = Engine(models()[0], windowed(), scheduler=Static(), **SHAPE)
    [expected] = own.generate([PROMPTS[0]], params)
    assert tuple(tokens) == expected.token_ids
    assert num_rounds == expected.acceptance.num_rounds


# Draft steps that read a window of a cache that keeps everything


def one_layer(**settings):
    """A draft model whose KV does not depend on what its queries see."""
    return DraftModel(toy.model(num_layers=1, seed=3), kv_sinks=SINKS, **settings)


@pytest.mark.parametrize("tree", [None, pytest.param(BEAM, marks=pytest.mark.slow)])
def test_a_variant_drafts_what_a_windowed_draft_model_drafts(tree):
    requests = dict(enumerate(requests_of(PROMPTS, params_of())))
    [variant] = one_layer(tree=tree).trying_window(WINDOW).variants
    found = run(executor_of(variant), requests)
    assert found == run(executor_of(one_layer(tree=tree, kv_window=WINDOW)), requests)
    assert found != run(executor_of(one_layer(tree=tree)), requests)
    assert variant.variants == one_layer(tree=tree).variants == ()


def make_long_engine(kernels):
    """An adaptive engine of rows long enough for its draft model to try a window."""
    target = toy.model(num_layers=1, kernels=kernels)
    drafter = DraftModel(dataclasses.replace(target, name="draft"))
    settings = {"draft_length": "auto", "verify_length": 3, "batch_size": 1, "max_length": 4096}
    engine = Engine(target, drafter, scheduler=Static(), **settings)
    assert engine.describe()["tried_kv_window"] == 512
    return engine


@pytest.fixture(scope="module")
def long_engine():
    return make_long_engine(default_kernels())


def of_context(context, *, in_window):
    """A controller of the long engine: rounds in the window take this long, others two, and plain
    decoding takes long."""
    kinds = {PLAIN: 4.0, RoundKind(2): 2.0, RoundKind(2, 1): in_window}
    controller = DraftLengthController(
        RoundTimes(
            short_context=0, long_context=context, short_s=kinds, long_s=kinds, chunk_s=1e-6
        ),
        variants_draft_alike=False,
    )
    controller.times.note = lambda *arguments: None
    return controller


@pytest.mark.parametrize("in_window", [1.0, pytest.param(1.9, marks=pytest.mark.slow)])
def test_an_adaptive_engine_reads_a_window_where_that_is_faster(long_engine, in_window):
    """By a tenth at least; and the output is plain decoding's."""
    [prompt] = toy.prompts((900,))
    params = SamplingParams(max_tokens=60, temperature=0.7, seed=1, ignore_eos=True)
    long_engine.adaptive.controller = of_context(900, in_window=in_window)
    [done] = long_engine.generate([prompt], params)
    num_rounds = long_engine.describe()["rounds_in_kv_window"]
    assert num_rounds == (done.acceptance.num_rounds if in_window == 1.0 else 0)
    [plain] = long_engine.generate([prompt], params, speculate=False)
    assert done.token_ids == plain.token_ids


def test_a_window_in_which_less_is_accepted_is_given_up(long_engine):
    """With the whole context all is accepted, for the target drafts for itself."""
    [prompt] = toy.prompts((900,))
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    long_engine.adaptive.controller = controller = of_context(900, in_window=1.7)
    long_engine.generate([prompt], params)
    assert 0 < long_engine.describe()["rounds_in_kv_window"] < 40
    assert controller.acceptance(variant=1)[1] < controller.acceptance()[1]


@pytest.mark.parametrize("is_broken", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_variant_whose_rounds_have_other_bits_is_left_out(is_broken):
    """With kernels that promise nothing of programs that differ."""
    engine = make_long_engine("xla")
    run = engine.executor.programs["run_variant_1"]

    def wrong_run(*arguments):
        after = run(*arguments)
        return after.replace(tokens=after.tokens.at[0, 4].add(1))

    if is_broken:
        engine.executor.programs["run_variant_1"] = wrong_run
    engine.adaptive.prepare()
    assert engine.describe()["tried_kv_window"] == (None if is_broken else 512)
    assert any(kind.variant for kind in engine.adaptive.controller.times.kinds) != is_broken


# Memory and bad settings


@pytest.mark.parametrize(
    ("settings", "num_pages"),
    [({}, 3), ({"tree": BeamTree(width=8, depth=20, nodes=30)}, 4)],
    ids=["chain", "tree"],
)
def test_kv_does_not_grow_with_the_context(settings, num_pages):
    def shapes(max_length):
        drafter = windowed(**settings)
        size = {**SHAPE, "max_length": max_length}
        executor = make_executor(models()[0], drafter, scheduler=Static(), **size)
        return executor.eval_state().drafter.cache, executor.memory

    small, memory = shapes(1152)
    large, larger = shapes(8192)
    assert num_bytes(small.layers) == num_bytes(large.layers)
    assert small.layers[0].k.shape[0] == 3 * num_pages
    assert large.capacity >= 8192
    # Only the target's KV grew.
    target = models()[0].config
    per_slot = 4 * 2 * target.num_layers * target.num_kv_heads * target.head_size
    assert larger.kv_bytes - memory.kv_bytes == pytest.approx(
        3 * (8192 - 1152) * per_slot, rel=0.01
    )


def test_what_cannot_keep_a_window_is_refused():
    for settings, message in (
        ({"kv_window": 127}, r"kv_window 127 was given; .* so give at least 128, or None"),
        ({"kv_window": 256, "kv_sinks": -1}, r"kv_sinks -1 was given; .* from 0 to 128"),
        ({"kv_window": 256, "kv_sinks": 129}, r"kv_sinks 129 was given; .* from 0 to 128"),
    ):
        with pytest.raises(SettingError, match=message):
            DraftModel(models()[1], **settings)
    with pytest.raises(SettingError, match=r"a kv_window of 128 were given; .* layout 'ragged'"):
        Engine(models()[0], windowed(), layout="aligned", **SHAPE)
    with pytest.raises(SettingError, match=r"kv_window of 128 was given .* an? Untapped"):
        DraftModel(Untapped(models()[1]), kv_window=WINDOW)
    Engine(models()[0], DraftModel(models()[1]), layout="aligned", **SHAPE)


def break_even(*, max_length=8192, **options):
    """Of 32 rows of Qwen3-8B with Qwen3-0.6B, from shapes."""
    target, draft = (
        shape_model(PRESETS[name], name=name, dtype="bfloat16", is_packed=False)
        for name in ("qwen3-8b", "qwen3-0.6b")
    )
    config = EngineConfig(scheduler="static", draft_length=4, batch_size=32, max_length=max_length)
    return window_break_even(make_parts(target, DraftModel(draft, **options), config))


def test_the_bytes_that_a_window_would_save_are_told():
    weights = [2 * decoder.num_params(PRESETS[name]) for name in ("qwen3-8b", "qwen3-0.6b")]
    of_token = [2 * 36 * 8 * 128 * 2, 2 * 28 * 8 * 128 * 2]  # Keys and values, layers, heads, bf16.

    def round_bytes(num_slots):
        target, draft = (
            32 * size * tokens for size, tokens in zip(of_token, (8192, num_slots), strict=True)
        )
        return weights[0] + target + 4 * (weights[1] + draft)

    expected = round_bytes(512 + 128) / round_bytes(8192)
    assert break_even() == pytest.approx(expected, rel=1e-6)
    assert 0.3 < expected < 0.4
    assert break_even(kv_window=512) is None
    assert break_even(max_length=2048) is None
    assert break_even(max_length=4096) > expected


def test_an_engine_describes_it_unless_little_would_be_saved():
    target, draft = toy.model(num_layers=2), toy.model(seed=1, num_layers=1)
    engine = Engine(target, DraftModel(draft), batch_size=1, max_length=4096, draft_length=1)
    own, other = (
        [8 * 2 * 2 * 4 * model.config.num_layers for model in (target, draft)],
        [4 * decoder.num_params(model.config) for model in (target, draft)],
    )
    full, windowed = (
        sum(other) + 4096 * own[0] + num_slots * own[1] for num_slots in (4096, 512 + 128)
    )
    assert engine.describe()["kv_window_break_even"] == pytest.approx(windowed / full)
    narrow = dataclasses.replace(draft.config, sliding_windows=(100,))
    drafters = NGram(), DraftModel(dataclasses.replace(draft, config=narrow))
    for drafter in drafters:
        engine = Engine(target, drafter, batch_size=1, max_length=4096, draft_length=1)
        assert engine.describe()["kv_window_break_even"] is None
