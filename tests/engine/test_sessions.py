"""Sessions: a turn that reuses KV equals the same chat from nothing, wherever the KV was kept."""

from __future__ import annotations

import dataclasses
import logging
import threading
import types

import engines
import heads
import jax
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec import DraftModel, Engine, Heads, NGram, SamplingParams
from jaxspec.decode.kept import StoredRow
from jaxspec.decode.settings import pinned_memory
from jaxspec.engine import core
from jaxspec.engine.conversation import Conversation
from jaxspec.engine.row_store import ROW_PROGRAMS
from jaxspec.errors import PromptError, QueueFullError, RequestError, SettingError
from jaxspec.models import prefill

SHAPE = engines.SHAPE | {"draft_length": 3}
CHUNK = prefill.CHUNK
GREEDY = SamplingParams(max_tokens=13, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=13, ignore_eos=True, temperature=0.9, seed=3)
FIRST, SECOND, THIRD, OTHER = toy.prompts((21, 9, 30, 17))
HEADS = ("clover", "clover2")


@pytest.fixture(scope="module")
def target():
    return toy.model(num_layers=1)


@pytest.fixture(scope="module")
def engine(target):
    """Its kernels are XLA's."""
    return engines.engine("toy", "draft model")


@pytest.fixture(scope="module")
def ngram():
    return engines.engine("toy", "ngram")


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    yield
    for name in {"engine", "ngram"} & set(request.fixturenames):
        engine = request.getfixturevalue(name)
        assert not engine.has_unfinished
        engine.update_params(target=engines.target("toy").params)  # drops what sessions keep
        engine.reset()


def chat(session, params=GREEDY, turns=(FIRST, SECOND, THIRD)):
    """The completions of a chat whose prompts each hold the answers before them."""
    history, found = [], []
    for turn in turns:
        done = session.generate([*history, *turn], params)
        found.append(done)
        history = list(done.prompt_token_ids + done.token_ids)
    return found


def from_nothing(engine, completion, params=GREEDY):
    """What the engine makes of the same prompt as a request of its own."""
    [expected] = engine.generate([completion.prompt_token_ids], params)
    return expected


def check_chat(engine, completions, params=GREEDY):
    """Raises unless every turn equals the same chat decoded from nothing."""
    for done in completions:
        assert done.token_ids == from_nothing(engine, done, params).token_ids


def kv_of(engine, row):
    return [values.tobytes() for values in engine.executor.committed_kv(row)]


# ------------------------------------------------------------------------------ the same as before


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_turns_equal_the_same_chat_from_nothing_and_read_only_what_is_new(engine, params):
    with engine.session() as session:
        completions = chat(session, params)
        assert session.place == "device"
        assert session.token_ids == completions[-1].prompt_token_ids + completions[-1].token_ids
    assert [done.num_reused_tokens for done in completions] == [
        0,
        # All of the turn before but its newest token, which has no KV yet.
        len(FIRST) + 13 - 1,
        len(FIRST) + 13 + len(SECOND) + 13 - 1,
    ]
    assert [done.num_reread_tokens for done in completions] == [0, 0, 0]
    check_chat(engine, completions, params)
    assert session.place == "none"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(None, marks=pytest.mark.slow),
        "ngram",
        pytest.param("draft tree", marks=pytest.mark.slow),
        pytest.param("clover", marks=pytest.mark.slow),
        pytest.param("clover2", marks=pytest.mark.slow),
    ],
)
def test_every_drafter_keeps_what_it_can(name):
    if name in HEADS:
        target = heads.target(num_layers=1)
        engine = Engine(target, heads.random_heads(name, target), **engines.SHAPE)
    else:
        engine = engines.engine("toy", name)
    session = engine.session()
    completions = chat(session)
    seam = bool(engine.executor.parts.drafter.taps)
    known = len(FIRST) + 13 - 1
    assert completions[1].num_reused_tokens == known - seam
    assert completions[1].num_reread_tokens == seam
    for done in completions:
        expected = from_nothing(engine, done)
        assert done.token_ids == expected.token_ids
        # It drafts as if it had read the whole prompt.
        assert done.acceptance == expected.acceptance


@pytest.mark.slow
def test_heads_read_the_pair_at_the_seam_again(monkeypatch):
    """Clover-2 pairs a token's feature with the token after it; the last pair that is kept was of
    the old next token."""
    target = heads.target(num_layers=1)
    drafter = heads.random_heads("clover2", target)
    one = SamplingParams(max_tokens=1, ignore_eos=True)

    def make():
        return Engine(target, drafter, max_length=256, batch_size=1)

    def pairs(engine):
        """What the heads' block keeps of the prompt."""
        cache = engine.state.drafter.cache
        page = int(cache.table[engine.executor.free_rows(())[0], 0])
        return np.asarray(cache.layers[0].k)[page, :, : len(FIRST) + 2]

    def after_a_turn():
        engine = make()
        session = engine.session()
        session.generate([*FIRST, 1, 2, 3], one)
        session.generate([*FIRST, 4, 5, 6], one)
        return pairs(engine)

    def keep_one_too_many(self, shape, params, state, rows, row, num_kept):
        return rewind(self, shape, params, state, rows, row, num_kept + 1)

    engine, rewind = make(), Heads.rewind
    engine.generate([[*FIRST, 4, 5, 6]], one)
    assert np.allclose(after_a_turn(), pairs(engine), atol=1e-5)
    monkeypatch.setattr(Heads, "rewind", keep_one_too_many)
    assert not np.allclose(after_a_turn(), pairs(engine), atol=1e-5)


def test_kernels_that_sum_in_one_order_keep_every_bit():
    target = toy.model(num_layers=2, kernels="native", head_size=16, dtype=np.dtype("float32"))
    engine = Engine(target, NGram(1, 3), **SHAPE)
    session = engine.session()
    assert session.exactness == "bitwise"
    chat(session)
    done = session.generate(list(session.token_ids) + OTHER, GREEDY)
    row = engine.executor.free_rows(())[0]
    ours = kv_of(engine, row)
    engine.reset()
    assert from_nothing(engine, done).token_ids == done.token_ids
    assert ours == kv_of(engine, row)


def test_other_kernels_keep_every_bit_where_answers_are_read_again(engine):
    assert engine.session().exactness == "ties"
    session = engine.session(reread=True)
    assert session.exactness == "bitwise"
    completions = chat(session)
    # Whole chunks of the prompt before, and nothing that rounds wrote.
    kept = [0, len(FIRST) - 1, len(FIRST) + 13 + len(SECOND) - 1]
    assert [done.num_reused_tokens for done in completions] == [n - n % CHUNK for n in kept]
    assert completions[1].num_reread_tokens == len(FIRST) + 12 - CHUNK
    row = engine.executor.free_rows(())[0]
    ours = kv_of(engine, row)
    engine.reset()
    assert from_nothing(engine, completions[-1]).token_ids == completions[-1].token_ids
    assert ours == kv_of(engine, row)


def test_a_second_turn_reads_a_fraction_of_the_chunks(engine, monkeypatch):
    """Of a history of 200 tokens: what the time to its first token consists of."""
    calls = []
    real = engine.executor.programs["prefill"]
    monkeypatch.setitem(
        engine.executor.programs, "prefill", lambda *args: (calls.append(1), real(*args))[1]
    )
    [history, question] = toy.prompts((186, 40))
    session = engine.session()
    first = session.generate(history, GREEDY)
    calls.clear()
    second = session.generate([*history, *first.token_ids, *question], GREEDY)
    with_session = len(calls)
    calls.clear()
    from_nothing(engine, second)
    assert len(calls) >= 3 * with_session > 0


# --------------------------------------------------------------------------------- seams, sabotage


def test_an_edited_history_is_reused_up_to_the_first_difference(engine):
    session = engine.session()
    first = session.generate(FIRST, GREEDY)
    edited = [*FIRST[:12], (FIRST[12] + 1) % toy.VOCAB, *FIRST[13:], *first.token_ids, *SECOND]
    done = session.generate(edited, GREEDY)
    assert (done.num_reused_tokens, done.num_reread_tokens) == (12, len(FIRST) + 12 - 12)
    check_chat(engine, [done])
    # The same prompt once more, and its beginning: all but the last token are there.
    for prompt in (edited, edited[:20]):
        again = session.generate(prompt, GREEDY)
        check_chat(engine, [again])
    assert again.num_reused_tokens == 19
    nothing_shared = session.generate([(FIRST[0] + 1) % toy.VOCAB, *OTHER], GREEDY)
    assert nothing_shared.num_reused_tokens == 0
    check_chat(engine, [nothing_shared])


def test_a_seam_kept_one_position_too_far_is_caught(engine, monkeypatch):
    real = Conversation.num_common

    def one_too_far(self, prompt, *, is_reread):
        found = real(self, prompt, is_reread=is_reread)
        return min(found + 1, len(prompt) - 1) if found else 0

    session = engine.session()
    session.generate(FIRST, GREEDY)
    monkeypatch.setattr(Conversation, "num_common", one_too_far)
    done = session.generate([*FIRST, (session.token_ids[len(FIRST)] + 1) % toy.VOCAB, 7], GREEDY)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check_chat(engine, [done])


def test_what_follows_a_stop_string_never_counts():
    engine = engines.engine("text", "ngram")
    whole = engine.generate(["once upon"], GREEDY)[0].text
    stop = whole[4:6]
    params = dataclasses.replace(GREEDY, stop=(stop,))
    session = engine.session()
    first = session.generate("once upon", params)
    assert first.stop_reason == stop
    second = session.generate("once upon" + first.text + " and then", params)
    check_chat(engine, [second], params)


@pytest.mark.parametrize("num_steps", [1, 4, 6])
def test_a_turn_that_was_cancelled_leaves_what_was_read(engine, num_steps, monkeypatch):
    monkeypatch.setattr(core, "CHUNKS_OF_A_BURST", 0)
    long = dataclasses.replace(GREEDY, max_tokens=120)
    [text] = toy.prompts((90,), seed=5)
    session = engine.session()
    first = session.generate(FIRST, GREEDY)
    history = [*FIRST, *first.token_ids, *text]
    engine.submit(OTHER, GREEDY)  # so that a step reads one chunk
    name = engine.submit(history, long, session=session)
    for _ in range(num_steps):
        engine.step()
    engine.cancel(name)
    while engine.has_unfinished:
        engine.step()
    done = session.generate([*history, 1], GREEDY)
    # The first step reads the other prompt, each of the next ones a chunk of this one.
    num_new = done.num_reused_tokens - len(FIRST) - 12
    assert (num_new > 0) == (num_steps > 1)
    assert num_new >= 0
    check_chat(engine, [done])


def test_the_drafter_catches_up_after_turns_without_it(engine):
    session = engine.session()
    long = dataclasses.replace(GREEDY, max_tokens=60)
    first = session.generate(FIRST, long, speculate=False)
    assert first.acceptance.num_draft_tokens == 0
    done = session.generate([*FIRST, *first.token_ids, *SECOND], GREEDY)
    expected = from_nothing(engine, done)
    assert done.acceptance == expected.acceptance
    assert done.token_ids == expected.token_ids


# ---------------------------------------------------------------------------------- rows and host


def test_sessions_take_turns_in_too_few_rows(engine):
    sessions = [engine.session() for _ in range(5)]
    prompts = toy.prompts((20, 33, 5, 40, 150), seed=8)
    found = [
        session.generate(prompt, GREEDY) for session, prompt in zip(sessions, prompts, strict=True)
    ]
    assert [session.place for session in sessions].count("host") == 5 - engine.num_residents
    for _ in range(2):
        for index, session in enumerate(sessions):
            history = found[index].prompt_token_ids + found[index].token_ids
            found[index] = session.generate([*history, *SECOND], GREEDY)
            assert found[index].num_reused_tokens == len(history) - 1
            assert session.place == "device"
    memory, metrics = engine.memory, engine.metrics()
    assert memory.num_parked_tokens == metrics["num_parked_tokens"] > 0
    assert memory.parked_bytes % engine.row_store.row_bytes(1) > 0  # and what is not in pages
    assert memory.num_resident_tokens == sum(
        session.num_kept_tokens for session in sessions if session.place == "device"
    )
    assert "on the host" in memory.sentence
    check_chat(engine, found)
    counts = engine.executor.compile_counts()
    assert {counts[name] for name in ROW_PROGRAMS} == {1}
    for session in sessions:
        session.close()
    assert (engine.memory.num_parked_tokens, engine.memory.num_resident_tokens) == (0, 0)


def test_rows_are_kept_while_others_are_free(engine):
    session = engine.session()
    first = session.generate(FIRST, GREEDY)
    engine.generate([OTHER], GREEDY)
    assert session.place == "device"
    engine.generate([OTHER] * engine.num_residents, GREEDY)
    assert session.place == "host"
    second = session.generate([*FIRST, *first.token_ids, *SECOND], GREEDY)
    assert second.num_reused_tokens == len(FIRST) + 12
    check_chat(engine, [second])


def test_the_least_recently_used_is_dropped_first_and_read_again(target):
    one = engines.engine("toy", "ngram").row_store.row_bytes(30)
    engine = Engine(target, NGram(1, 3), session_bytes=2 * one, **SHAPE)
    sessions = [engine.session() for _ in range(3)]
    for session in sessions:
        first = session.generate(FIRST, GREEDY)
    engine.generate([OTHER] * engine.num_residents, GREEDY)
    assert [session.place for session in sessions] == ["none", "host", "host"]
    assert engine.memory.parked_bytes == 2 * one
    again = sessions[0].generate([*FIRST, *first.token_ids, *SECOND], GREEDY)
    assert (again.num_reused_tokens, again.num_reread_tokens) == (0, len(FIRST) + 12)
    metrics = engine.metrics()
    assert metrics["num_reread_tokens"] == metrics["num_dropped_tokens"] == len(FIRST) + 12
    assert engine.memory.num_reread_tokens == len(FIRST) + 12
    check_chat(engine, [again])


def test_memory_that_ran_out_costs_only_the_session_that_was_parked_then(ngram, monkeypatch):
    engine = ngram
    lucky, unlucky = engine.session(), engine.session()
    first = [session.generate(FIRST, GREEDY) for session in (lucky, unlucky)]
    real, calls = StoredRow.on_host, []

    def exhausted_at_the_second(self, place):
        calls.append(place)
        if len(calls) == 2:
            raise MemoryError("no more")
        return real(self, place)

    monkeypatch.setattr(StoredRow, "on_host", exhausted_at_the_second)
    engine.generate([OTHER] * engine.num_residents, GREEDY)
    assert (lucky.place, unlucky.place) == ("host", "none")
    found = [
        session.generate([*FIRST, *done.token_ids, *SECOND], GREEDY)
        for session, done in zip((lucky, unlucky), first, strict=True)
    ]
    known = len(FIRST) + 12
    assert [done.num_reused_tokens for done in found] == [known, 0]
    assert [done.num_reread_tokens for done in found] == [0, known]
    check_chat(engine, found)


def test_kv_is_parked_in_pinned_memory_where_the_device_has_it(target, monkeypatch):
    engine = Engine(target, DraftModel(toy.model(seed=1, num_layers=1)), **SHAPE)
    assert engine.row_store.parking_place is None  # a CPU is the host
    pinned = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    monkeypatch.setattr(engine.row_store, "parking_place", pinned)
    session = engine.session()
    first = session.generate(FIRST, GREEDY)
    stored = engine.row_store.park_row(session.row, session.num_kept_tokens)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves((stored.pages, stored.rest))}
    assert kinds == {"pinned_host"}
    engine.generate([OTHER] * engine.num_residents, GREEDY)
    assert session.place == "host"
    assert engine.memory.parked_bytes == stored.num_bytes
    second = session.generate([*FIRST, *first.token_ids, *SECOND], GREEDY)
    assert second.num_reused_tokens == len(FIRST) + 12
    check_chat(engine, [second])
    assert engine.executor.compile_counts()["run"] == 1


@pytest.mark.parametrize(
    ("platform", "kinds", "expected"),
    [
        ("gpu", ("device", "pinned_host"), "pinned_host"),
        ("gpu", ("device",), None),
        ("cpu", ("device", "pinned_host", "unpinned_host"), None),
    ],
)
def test_which_devices_have_pinned_memory(platform, kinds, expected):
    memories = [types.SimpleNamespace(kind=kind) for kind in kinds]
    device = types.SimpleNamespace(platform=platform, addressable_memories=lambda: memories)
    home = types.SimpleNamespace(device_set=[device], with_memory_kind=lambda kind: kind)
    assert pinned_memory(home) == expected


def test_forks_go_on_by_themselves(engine):
    session = engine.session()
    first = session.generate(FIRST, GREEDY)
    twin = session.fork()
    assert (session.place, twin.place) == ("device", "host")
    history = [*FIRST, *first.token_ids]
    ours, theirs = session.generate([*history, 5, 6], GREEDY), twin.generate([*history, 7], GREEDY)
    third = twin.fork().generate([*history, 7, *theirs.token_ids, 8], GREEDY)
    assert ours.num_reused_tokens == theirs.num_reused_tokens == len(history) - 1
    assert third.num_reused_tokens == len(history) + 1 + 13 - 1
    check_chat(engine, [ours, theirs, third])


def test_a_common_prefix_is_read_once(engine):
    [system] = toy.prompts((70,), seed=9)
    params = [GREEDY, SAMPLED]
    prompts = [[*system, *SECOND], [*system, *OTHER]]
    expected = engine.generate(prompts, params)
    assert {done.num_reused_tokens for done in expected} == {None}
    bits = [kv_of(engine, row) for row in engine.executor.free_rows(())[:2]]
    before = engine.metrics()
    assert engine.cache_prefix(system) == 70
    counts = ("num_requests", "num_prompt_tokens", "num_by_finish_reason", "num_emitted_tokens")
    for name in (*counts, "num_rounds", "latencies"):  # it is nobody's request
        assert engine.metrics()[name] == before[name], name
    found = engine.generate(prompts, params)
    # XLA's kernels: whole chunks of what a prompt's chunks wrote.
    assert [done.num_reused_tokens for done in found] == [64, 64]
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]
    assert bits == [kv_of(engine, row) for row in engine.executor.free_rows(())[:2]]
    assert [done.num_reused_tokens for done in chat(engine.session(), turns=prompts[:1])] == [70]
    engine.forget_prefixes()
    assert engine.generate(prompts, params)[0].num_reused_tokens is None
    assert engine.memory.num_parked_tokens == 0


@pytest.mark.parametrize("num_turns", [200])
def test_turns_leave_nothing_behind(engine, num_turns):
    def live_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    few = dataclasses.replace(GREEDY, max_tokens=2)
    sessions = [engine.session() for _ in range(4)]
    seen = []
    for turn in range(num_turns):
        session = sessions[turn % 4]
        history = session.token_ids if len(session.token_ids) < 150 else ()
        session.generate([*history, *OTHER], few)
        if turn >= 16:
            seen.append(live_bytes())
    assert engine.metrics()["num_parked_tokens"] > 0
    assert len(set(seen)) == 1


def test_threads_have_sessions_of_their_own(engine):
    found = {}

    def work(index):
        with engine.session() as session:
            found[index] = chat(session, turns=toy.prompts((8 + index, 5, 9), seed=index))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 5
    for completions in found.values():
        check_chat(engine, completions)


# -------------------------------------------------------------------------------------- bad input


def test_what_a_session_refuses_costs_it_nothing(engine, target):
    session = engine.session()
    first = session.generate(FIRST, GREEDY)
    history = [*FIRST, *first.token_ids]
    with pytest.raises(PromptError, match="300 tokens, and the engine's max_length leaves room"):
        session.generate([*history, *OTHER * 20][:300], GREEDY)
    with pytest.raises(PromptError, match="is empty"):
        session.generate([], GREEDY)
    with pytest.raises(SettingError, match="draft length of 9"):
        session.generate(history, GREEDY, draft_length=9)
    stranger = Engine(target, batch_size=1, max_length=128)
    with pytest.raises(RequestError, match="A session of another engine was given"):
        stranger.submit(history, GREEDY, session=session)
    assert session.place == "device"
    stream = session.stream([*history, 3], dataclasses.replace(GREEDY, max_tokens=40))
    next(stream)
    for call in (
        lambda: session.generate([*history, 4], GREEDY),
        lambda: engine.submit([*history, 4], GREEDY, session=session),
        session.fork,
    ):
        with pytest.raises(
            RequestError, match="its last turn has not ended, perhaps in another thread"
        ):
            call()
    *_, last = stream
    check_chat(engine, [last.completion], dataclasses.replace(GREEDY, max_tokens=40))
    done = session.generate([*history, 4], GREEDY)
    assert done.num_reused_tokens == len(history)  # the newest token has been scored since
    session.close()
    session.close()
    for call in (lambda: session.generate(FIRST, GREEDY), session.fork):
        with pytest.raises(RequestError, match="A closed session was"):
            call()
    assert "closed" in repr(session)


def test_a_full_queue_leaves_the_session_as_it_was(target):
    engine = Engine(target, max_queue=1, **SHAPE)
    session = engine.session()
    first = session.generate(FIRST, GREEDY)
    engine.submit(OTHER, GREEDY)
    with pytest.raises(QueueFullError):
        session.generate([*FIRST, *first.token_ids, 1], GREEDY)
    while engine.has_unfinished:
        engine.step()
    done = session.generate([*FIRST, *first.token_ids, 1], GREEDY)
    assert done.num_reused_tokens == len(FIRST) + 13 - 1


def test_engines_that_cannot_keep_rows_say_so(target):
    aligned = Engine(target, NGram(1, 3), layout="aligned", **SHAPE)
    for call in (aligned.session, lambda: aligned.cache_prefix(FIRST)):
        with pytest.raises(SettingError, match="the layout is aligned"):
            call()
    with pytest.raises(SettingError, match="session_bytes -1"):
        Engine(target, session_bytes=-1)
    small = Engine(target, session_bytes=10, **SHAPE)
    with pytest.raises(SettingError, match="A prefix of 21 tokens was given"):
        small.cache_prefix(FIRST)


def test_other_weights_drop_what_the_old_ones_made(engine, caplog):
    new = toy.model(seed=4, num_layers=1)
    sessions = [engine.session() for _ in range(engine.num_residents + 1)]
    first = [session.generate(FIRST, GREEDY) for session in sessions]
    engine.cache_prefix(OTHER)
    with caplog.at_level(logging.WARNING, logger="jaxspec.engine.engine"):
        engine.update_params(target=new.params)
    num_kept = len(sessions) * (len(FIRST) + 12) + len(OTHER)
    assert f"the KV of {num_kept} tokens" in caplog.text
    assert {session.place for session in sessions} == {"none"}
    done = sessions[0].generate([*FIRST, *first[0].token_ids, *SECOND], GREEDY)
    assert (done.num_reused_tokens, done.num_reread_tokens) == (0, len(FIRST) + 12)
    check_chat(engine, [done])


def test_a_lost_state_costs_a_reread(ngram, monkeypatch):
    engine = ngram
    kept, parked = engine.session(), engine.session()
    first = parked.generate(FIRST, GREEDY)
    engine.generate([OTHER] * engine.num_residents, GREEDY)
    kept.generate(FIRST, GREEDY)
    programs, real = engine.executor.programs, engine.executor.programs["run"]

    def fails(params, state, *numbers):
        jax.block_until_ready(real(params, state, *numbers))
        raise RuntimeError("the device is gone")

    monkeypatch.setitem(programs, "run", fails)
    with pytest.raises(RuntimeError, match="is gone"):
        engine.generate([OTHER], GREEDY)
    monkeypatch.undo()
    assert (kept.place, parked.place) == ("none", "host")
    found = [each.generate([*FIRST, *first.token_ids, 2], GREEDY) for each in (kept, parked)]
    assert [done.num_reused_tokens for done in found] == [0, len(FIRST) + 12]
    check_chat(engine, found)


# ------------------------------------------------------------------------- with other settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": "auto", "exactness": "ties"},
        {"scheduler": jaxspec.Static()},
        {"scheduler": jaxspec.Pool(window_size=3)},
        {"check_invariants": True, "max_logprobs": 1, "trace": "tokens"},
        {"verifier": "rejection"},
    ],
    ids=str,
)
def test_sessions_with_other_settings(target, options):
    engine = Engine(target, DraftModel(toy.model(seed=1, num_layers=1)), **{**SHAPE, **options})
    sessions = [engine.session() for _ in range(engine.num_residents + 2)]
    histories = [list(prompt) for prompt in toy.prompts((20, 33, 5, 40, 70, 9), seed=8)]
    found = []
    for turn in range(3):
        names = {}
        for index, session in enumerate(sessions):
            histories[index] += SECOND[:turn]
            names[engine.submit(histories[index], GREEDY, session=session)] = index
        while engine.has_unfinished:
            for done in engine.step():
                index = names[done.request_id]
                if turn > 0:
                    assert done.num_reused_tokens == len(histories[index]) - turn - 1
                    found.append(done)
                histories[index] += done.token_ids
    assert len(found) == 2 * len(sessions)
    check_chat(engine, found)
