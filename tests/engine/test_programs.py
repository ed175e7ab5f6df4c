"""Programs that say what they compile, and engines that compile theirs ahead of time."""

import gc
import itertools
import logging
import os
import pty
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import jaxspec
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime import compilation
from jaxspec.runtime.compilation import Program, numbered
from jaxspec.serving import ServingEngine
from jaxspec.types import DecodeState

PATIENCE_S = 0.05
_constants = itertools.count(1000 * os.getpid())


@pytest.fixture(autouse=True)
def _heard(caplog, monkeypatch):
    logger = logging.getLogger("jaxspec.runtime.compilation")
    monkeypatch.setattr(logger, "propagate", False)  # as a command in this process may have done
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger.name):
        yield
    logger.removeHandler(caplog.handler)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(compilation, "PATIENCE_S", PATIENCE_S)


def slow(constant=None, *, seconds=6 * PATIENCE_S):
    """A function that takes long to trace; no other has the same program."""
    constant = next(_constants) % 2**31 if constant is None else constant

    def function(x):
        time.sleep(seconds)
        return x + constant

    return function


@pytest.fixture
def num_compiled():
    """How many programs have been compiled or loaded since the fixture was made."""
    names = []

    def note(event, duration, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(more.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield lambda: len(names)
    jax.monitoring.unregister_event_duration_listener(note)


def test_a_long_compile_is_announced_and_timed(monkeypatch, caplog):
    first, second = numbered(
        Program(jax.jit(slow(seconds=0)), "nothing much"), Program(jax.jit(slow()), "the long one")
    )
    one = np.int32(1)
    monkeypatch.setattr(compilation, "PATIENCE_S", 1e3)
    first(one)
    assert first.compiled.seconds > 0
    assert not caplog.records
    monkeypatch.setattr(compilation, "PATIENCE_S", PATIENCE_S)
    second(one)
    begun, ended = [record.getMessage() for record in caplog.records]
    assert begun == "compiling 2 of 2: the long one"
    assert ended.startswith("compiled 2 of 2: the long one in ")
    assert second.compiled.seconds >= 6 * PATIENCE_S
    assert f"{second.compiled.seconds:.1f} s" in ended
    caplog.clear()
    # Nothing stands between a later call and the function.
    monkeypatch.setattr(second, "compile", lambda *_: pytest.fail("it was compiled before"))
    assert int(second(one)) == int(second(np.int32(1)))
    assert not caplog.records


def test_whether_the_persistent_cache_held_it(impatient, caplog):
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        function = slow()
        programs = [Program(jax.jit(lambda x: function(x)), "it") for _ in range(2)]
        found = [program.compile(np.int32(1)).is_cached for program in programs]
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    assert found == [False, True]
    ends = [record.getMessage() for record in caplog.records][1::2]
    assert ends[0].endswith(" s (not in the cache)")
    assert ends[1].endswith(" s (from the cache)")


def test_events_that_this_jax_does_not_have_cost_the_word_on_the_cache_only(
    impatient, caplog, monkeypatch
):
    for name in ("CACHE_ASKED", "CACHE_HIT"):
        monkeypatch.setattr(compilation, name, "/jax/renamed")
    program = Program(jax.jit(slow()), "it")
    program(np.int32(1))
    assert program.compiled.is_cached is None
    assert caplog.messages[-1].endswith(" s")


def test_only_a_program_of_varying_shapes_looks_at_later_ones(impatient, caplog):
    shapes = [(2,), (3,), (2,)]
    for shapes_vary, num_lines in ((False, 2), (True, 4)):
        caplog.clear()
        program = Program(jax.jit(slow()), "it", shapes_vary=shapes_vary)
        for shape in shapes:
            program(np.zeros(shape, np.int32))
        assert len(caplog.records) == num_lines
        assert program.num_compilations() == 2


def test_threads_compile_a_program_once(num_compiled):
    program = Program(jax.jit(slow()), "it")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(program, [np.int32(1)] * 4))
    assert len({int(value) for value in found}) == 1
    assert num_compiled() == 1


def test_a_trace_that_fails_leaves_nothing_behind(impatient, caplog):
    fails = [True]

    def function(x):
        time.sleep(4 * PATIENCE_S)
        if fails:
            raise ValueError("not today")
        return x

    program = Program(jax.jit(function), "it")
    before = threading.active_count()
    with pytest.raises(ValueError, match="not today"):
        program(np.int32(1))
    assert threading.active_count() == before
    assert program.compiled is None
    begun, ended = caplog.messages
    assert begun == "compiling it"
    assert ended.startswith("could not compile it in ")
    fails.clear()
    assert program(np.int32(5)) == 5


CODE = """
import time
import jax, numpy as np
from jaxspec.commands.compiling import MAX_LINES, show_compiling
from jaxspec.commands.progress import working
from jaxspec.runtime import compilation
compilation.PATIENCE_S = 0.05
show_compiling()
show_compiling()
def function(x):
    time.sleep(0.3)
    return x + 1
def program(name):
    return compilation.Program(jax.jit(lambda x: function(x)), name)
with working("a spinner"):
    for each in compilation.numbered(program("the first [one]"), program("the second")):
        each(np.int32(1))
for number in range(MAX_LINES):
    program(f"number {number}")(np.int32(1))
print("the result")
"""


def run_code(code=CODE, **streams):
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, env=os.environ | {"COLUMNS": "60"}, **streams)


@pytest.mark.slow
def test_a_command_prints_the_first_long_compilations_into_a_log_file():
    done = run_code(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = done.communicate()
    assert out == "the result\n", err
    lines = err.strip().split("\n")
    assert lines[:3] == [
        "compiling 1 of 2: the first [one]",
        "compiling 2 of 2: the second",
        "compiling number 0",
    ]
    assert lines[-1] == "compiling number 7 (later ones are not shown)"
    assert len(lines) == 10


@pytest.mark.slow
def test_a_command_shows_one_line_on_a_terminal_that_is_redrawn_and_goes():
    parent, child = pty.openpty()
    process = run_code(stdout=subprocess.PIPE, stderr=child, text=True)
    os.close(child)
    seen = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # all who could write have gone
            break
        if not part:
            break
        seen += part
    os.close(parent)
    assert process.communicate()[0] == "the result\n"
    text = seen.decode()
    for name in ("1 of 2: the first [one]", "2 of 2: the second", "number 9"):
        assert f"compiling {name}" in text
    # As many lines are erased as were begun, and the last one is.
    assert text.count("\x1b[1A") == text.count("\n")
    assert "compiling" not in text[text.rindex("\x1b[2K") :]


def test_the_library_prints_nothing_unless_logging_is_set_up():
    code = """
import logging, time, sys
import jax, numpy as np
from jaxspec.runtime import compilation
compilation.PATIENCE_S = 0.05
def function(x):
    time.sleep(0.3)
    return x + 1
compilation.Program(jax.jit(lambda x: function(x)), "in silence")(np.int32(1))
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
compilation.Program(jax.jit(lambda x: function(x)), "it")(np.int32(1))
"""
    done = run_code(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    _, err = done.communicate()
    ours = [line for line in err.split("\n") if line.startswith("jaxspec")]
    assert "in silence" not in err
    assert ours[0] == "jaxspec.runtime.compilation: compiling it"
    assert ours[1].startswith("jaxspec.runtime.compilation: compiled it in 0.")


def live_bytes():
    gc.collect()  # engines of earlier tests hold arrays until then
    return sum(array.nbytes for array in jax.live_arrays())


SMALL = {"batch_size": 2, "max_length": 128}


def make(kind):
    target = toy.model(num_layers=1)
    draft = jaxspec.DraftModel(toy.model(seed=1, num_layers=1))
    return {
        "plain": lambda: Engine(target, **SMALL),
        "speculative": lambda: Engine(
            target, draft, **SMALL, max_logprobs=2, trace="tokens", draft_length=2
        ),
        "adaptive": lambda: Engine(
            target, draft, **SMALL, draft_length="auto", verify_length=3, exactness="ties"
        ),
        "checked": lambda: Engine(target, **SMALL, check_invariants=True),
        "serving": lambda: ServingEngine(target, draft, **SMALL, draft_length=2),
        "ahead": lambda: running_ahead(target),
    }[kind]()


def running_ahead(target):
    """An engine that starts rounds before the last ones are read, as on accelerators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxspec.engine.executor._is_accelerated", lambda home: True)
        return Engine(target, **SMALL)


def use(engine):
    """Calls everything that an engine compiles."""
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=1)
    if isinstance(engine, ServingEngine):
        state = engine.init_decode_state()
        state = engine.insert(engine.prefill([1] * 40, params), state, 1)
        state, _ = engine.generate(state)
        state = engine.insert(engine.prefill([1, 2], SamplingParams()), state, 0)
        state, _ = engine.generate(engine.free(state, 1))
        return
    engine.generate([[1] * 40, [2], [3]], params)
    engine.submit([1, 2], SamplingParams(max_tokens=80), request_id="x")
    engine.step()
    engine.cancel("x")
    engine.step()


@pytest.mark.parametrize(
    "kind",
    ["plain", "ahead", pytest.param("speculative", marks=pytest.mark.slow), "adaptive", "serving"],
)
def test_after_a_warm_up_nothing_is_compiled(kind, num_compiled):
    engine = make(kind)
    shown, before, bytes_before = [], num_compiled(), live_bytes()
    compiled = engine.warm_up(lambda program: shown.append(str(program)))
    assert num_compiled() - before == len(compiled)
    assert live_bytes() == bytes_before  # no state was made
    assert shown == [
        f"{index + 1} of {len(compiled)}: {record.name}" for index, record in enumerate(compiled)
    ]
    assert any("decode round of toy0" in name and "batch size 2" in name for name in shown)
    assert all(record.seconds > 0 for record in compiled)
    before = num_compiled()
    use(engine)
    assert num_compiled() == before
    assert engine.warm_up() == compiled
    assert num_compiled() == before


def test_a_warm_up_compiles_what_prompt_logprobs_need_if_it_is_told_to(num_compiled):
    engine = make("speculative")
    assert not any("log-probabilities" in record.name for record in engine.warm_up())
    assert any("log-probabilities" in record.name for record in engine.warm_up(scoring=True))
    before = num_compiled()
    for max_tokens in (0, 5):
        engine.generate([[1] * 40, [2]], SamplingParams(max_tokens=max_tokens, prompt_logprobs=2))
    assert num_compiled() == before


@pytest.mark.parametrize("kind", ["plain", pytest.param("serving", marks=pytest.mark.slow)])
def test_the_check_above_catches_a_state_of_another_type(kind, num_compiled, monkeypatch):
    engine, real = make(kind), compilation.shapes_at

    def other(tree, shardings):
        if isinstance(tree, DecodeState):
            weak = jax.ShapeDtypeStruct(tree.finish.shape, jnp.int32, weak_type=True)
            tree = tree.replace(finish=weak)
        return real(tree, shardings)

    monkeypatch.setattr(compilation, "shapes_at", other)
    engine.warm_up()
    before = num_compiled()
    use(engine)
    assert num_compiled() > before


def test_an_engine_that_checks_invariants_warms_up_too(num_compiled):
    engine = make("checked")
    names = [record.name for record in engine.warm_up()]
    assert sum("decode round" in name for name in names) == 1
    engine.generate([[1, 2]], SamplingParams(max_tokens=3))
    assert engine.executor.compile_counts()["run"] == 1  # the round


def test_a_warm_up_while_requests_are_decoded_changes_nothing():
    engine = make("plain")
    engine.submit([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True))
    done = engine.step()
    engine.warm_up()
    while engine.has_unfinished:
        done += engine.step()
    [expected] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert [completion.token_ids for completion in done] == [expected.token_ids]


def test_an_engine_says_which_program_compiles(impatient, caplog):
    make("speculative").generate([[1, 2]], SamplingParams(max_tokens=2))
    expected = "the decode round of toy0 with draft_model:toy1, batch size 2, verify length 3"
    assert f"compiling 4 of 5: {expected}" in caplog.messages


@pytest.mark.filterwarnings("ignore:os.fork")
def test_a_forked_child_is_refused_instead_of_waiting_for_ever():
    program = Program(jax.jit(lambda x: x + 1), "a sum")
    assert program(1) == 2
    child = os.fork()
    if child == 0:
        try:
            program(1)
        except SettingError as error:
            is_named = f"Process {os.getpid()} was forked from process {os.getppid()}" in str(error)
            os._exit(0 if is_named else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert program(1) == 2
