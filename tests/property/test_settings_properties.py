"""Whatever a setting is given: within a second a result, or an error of ours in one line.

Every parameter of every public constructor and function is given every value below, the others
being small and right. Nothing is compiled, except where a value happens to be right.
"""

import asyncio
import dataclasses
import decimal
import fractions
import functools
import inspect
import time
import typing

import heads
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspec
from jaxspec import (
    Continuous,
    Coupled,
    DraftModel,
    Engine,
    Heads,
    NGram,
    Oracle,
    Pool,
    SamplingParams,
    Typical,
)
from jaxspec.audit.external import audit_outputs
from jaxspec.audit.outputs import Output, OutputsFile
from jaxspec.audit.probe import probe
from jaxspec.audit.scoring import Scorer
from jaxspec.audit.self_audit import audit_engine
from jaxspec.engine.config import EngineSettings, ServingSettings
from jaxspec.engine.executor import make_executor
from jaxspec.engine.intake import RequestSettings
from jaxspec.errors import JaxspecError
from jaxspec.lab.plan.request import Search
from jaxspec.runtime.values import shown
from jaxspec.serving import ServingEngine
from jaxspec.trees import BeamTree, BudgetTree, StaticTree, best_static_tree

LIMIT_S = 1.0  # of this process's own time, which other processes do not lengthen
LONGEST_MESSAGE = 700

HUGE = 10**400, -(10**400), 10**5000, -(10**5000)
NUMBERS = (0, -1, 1, 2, 2**30, 2**31, 2**63, -(2**63), *HUGE, 0.5, 2.5, -0.0, 1e300)
NOT_FINITE = (float("nan"), float("inf"), -float("inf"), np.float32("nan"))
SCALARS = (
    np.int64(3),
    np.uint8(1),
    np.float32(0.5),
    np.bool_(True),
    np.str_("text"),
    np.array(1),
    np.array(0.5),
    np.array("x"),
    np.array(None),
    jnp.array(2),
    jnp.array(True),
    ml_dtypes.bfloat16(0.5),
    fractions.Fraction(1, 2),
    decimal.Decimal(1),
    1j,
)
ARRAYS = (
    np.array([]),
    np.array([0]),
    np.array([1, 2]),
    np.array([0.5, 1.5]),
    np.array(["a", "b"]),
    np.array([[1, 2], [3, 4]]),
    jnp.array([1]),
    jnp.array([1, 2]),
)
OTHERS = (
    None,
    True,
    False,
    "",
    "text",
    "4",
    "auto",
    b"x",
    [],
    [1],
    ["a"],
    (1, 2),
    {},
    {"max_tokens": 1},
    {1},
    range(2),
    object(),
    int,
    NGram,
)
VALUES = (*NUMBERS, *NOT_FINITE, *SCALARS, *ARRAYS, *OTHERS)
# Those of the gate.
FEW = (
    *(0, -1, 1, 2**31, 2**63, 10**400, float("nan"), float("inf"), "text", None, True),
    *(np.array([1]), np.array([1, 2]), jnp.array([1, 2]), np.array(1)),
)
GREEDY = SamplingParams(max_tokens=1)
SHAPE = {"batch_size": 2, "max_length": 128}
[PROMPT] = toy.prompts((5,))


class Stop(Exception):
    """Ends a call at its first stage, before anything is compiled."""


def stop(*_):
    raise Stop


@functools.cache
def target():
    return toy.model(num_layers=1)


@functools.cache
def engine():
    made = Engine(target(), NGram(), **SHAPE)
    made.generate([PROMPT], GREEDY)
    return made


@functools.cache
def serving():
    made = ServingEngine(target(), NGram(), **SHAPE)
    state = made.insert(made.prefill(PROMPT, GREEDY), made.init_decode_state(), 0)
    made.free(made.generate(state)[0], 0)
    return made


def on_engine(name):
    """A method of the engine, whose output is read to its end; nothing stays queued."""

    def call(**given):
        result = getattr(engine(), name)(**given)
        if inspect.isgenerator(result):
            list(result)
        if inspect.isasyncgen(result):
            asyncio.run(to_end(result))
        while engine().has_unfinished:
            engine().step()

    return call


async def to_end(pieces):
    async for _ in pieces:
        pass


def on_session(name):
    def call(**given):
        with engine().session() as session:
            result = getattr(session, name)(**given)
            if inspect.isgenerator(result):
                list(result)

    return call


def on_state(name, *others):
    """A method of a serving engine that takes a state, which is made for each call."""

    def call(**given):
        right = {"state": serving().init_decode_state(), "row": 0, "prefilled": prefilled()}
        getattr(serving(), name)(**{key: right[key] for key in ("state", *others)} | given)

    return call


@functools.cache
def prefilled():
    return serving().prefill(PROMPT, GREEDY)


def with_keywords(settings, *others):
    """A function with the parameters of what takes `settings` as keywords."""

    def function(*_):
        raise NotImplementedError

    names = (*others, *typing.get_type_hints(settings))
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    function.__signature__ = inspect.Signature(parameters)
    return function


def every_door():
    """By name: a function, where its parameters are declared, those that are left out, and right
    values for those that it needs. Texts for some are looked up on the hub, and not given."""
    single, models = {"prompt": PROMPT, "params": GREEDY}, ("target", "drafter")
    turn = with_keywords(RequestSettings, "prompt", "params")
    streamed = with_keywords(RequestSettings, "prompt", "params", "request_id")
    submitted = with_keywords(RequestSettings, "prompt", "params", "request_id", "session")
    wanted = {"target": target(), "drafter": NGram(), **SHAPE}
    compared = {"target": target(), "candidates": {"a": None, "b": NGram()}, "prompts": [PROMPT]}
    planned = {"target": target(), "draft": None, "budget_bytes": 2**30}
    table = np.array([[0.5, 0.2]])
    output = Output(
        number=2,
        prompt_token_ids=tuple(PROMPT),
        token_ids=(1,),
        after_stop=(),
        params=GREEDY,
        stop_tokens=(),
    )
    file = OutputsFile(engine="x", version="1", dtype="float32", is_text=False, outputs=(output,))
    config = heads.random_heads("medusa", heads.target())
    return {
        "SamplingParams": (SamplingParams, None, "", {}),
        "Engine": (Engine, with_keywords(EngineSettings, *models), "", wanted),
        "make_executor": (make_executor, with_keywords(EngineSettings, *models), "", wanted),
        "ServingEngine": (
            ServingEngine,
            with_keywords(ServingSettings, *models, "draft_length"),
            "",
            wanted,
        ),
        "generate": (
            on_engine("generate"),
            Engine.generate,
            "prompts",
            {"prompts": [PROMPT], "params": GREEDY},
        ),
        "submit": (on_engine("submit"), submitted, "prompt", single),
        "stream": (on_engine("stream"), streamed, "prompt", single),
        "astream": (on_engine("astream"), streamed, "prompt", single),
        "session": (on_engine("session"), Engine.session, "", {}),
        "cache_prefix": (
            on_engine("cache_prefix"),
            Engine.cache_prefix,
            "prompt",
            {"prompt": PROMPT},
        ),
        "cancel": (on_engine("cancel"), Engine.cancel, "", {}),
        "update_params": (on_engine("update_params"), Engine.update_params, "", {}),
        "Session.generate": (on_session("generate"), turn, "prompt", single),
        "Session.stream": (on_session("stream"), turn, "prompt", single),
        "prefill": (serving().prefill, None, "prompt", single),
        "insert": (on_state("insert", "row", "prefilled"), ServingEngine.insert, "", {}),
        "serving.generate": (on_state("generate"), ServingEngine.generate, "", {}),
        "free": (on_state("free", "row"), ServingEngine.free, "", {}),
        "load_model": (jaxspec.load_model, None, "revision", {"src": "demo-draft"}),
        "DraftModel": (DraftModel, None, "", {"model": target()}),
        "Heads": (Heads, None, "", {"config": config.config, "params": config.params}),
        "NGram": (NGram, None, "", {}),
        "Oracle": (Oracle, None, "sequences", {"sequences": [PROMPT]}),
        "BeamTree": (BeamTree, None, "", {}),
        "BudgetTree": (BudgetTree, None, "", {}),
        "StaticTree": (StaticTree, None, "", {}),
        "best_static_tree": (best_static_tree, None, "", {"acceptance": table, "nodes": 2}),
        "Continuous": (Continuous, None, "", {}),
        "Pool": (Pool, None, "", {}),
        "Typical": (Typical, None, "", {}),
        "Coupled": (Coupled, None, "", {}),
        "Search": (Search, None, "", {}),
        "compare": (
            jaxspec.compare,
            with_keywords(
                EngineSettings, *list(inspect.signature(jaxspec.compare).parameters)[:-1]
            ),
            "prompts output",
            {**compared, "on_stage": stop},
        ),
        "plan_memory": (jaxspec.planning.plan_memory, None, "", {**planned, "say": stop}),
        "audit_engine": (
            audit_engine,
            None,
            "prompts",
            {"engine": engine(), "prompts": [PROMPT], "on_stage": stop},
        ),
        "audit_outputs": (
            audit_outputs,
            None,
            "",
            {"target": target(), "file": file, "scorer": Scorer(target(), max_length=16)},
        ),
        "probe": (probe, None, "", {}),
    }


NAMES = (
    "SamplingParams Engine make_executor ServingEngine generate submit stream astream session "
    "cache_prefix cancel update_params Session.generate Session.stream prefill insert "
    "serving.generate free load_model DraftModel Heads NGram Oracle BeamTree BudgetTree StaticTree "
    "best_static_tree Continuous Pool Typical Coupled Search compare plan_memory audit_engine "
    "audit_outputs probe"
).split()
COMPILING = ("compare", "audit_engine", "audit_outputs", "probe")  # which takes its time
TIMELESS = ("budget_bytes",)  # to count temporaries, a round is compiled
NOT_IN_GATE = (*COMPILING, "make_executor", "load_model")
ON_HUB = ("src", "target", "model", "draft", "drafter", "candidates")  # of these, texts are names
CALLED = (
    "on_progress",
    "on_result",
    "on_stage",
    "on_output",
    "say",
)  # what these raise is the caller's


@functools.cache
def doors():
    found = every_door()
    assert set(found) == set(NAMES)
    return found


def tried(call, arguments):
    """What is wrong with how a call ends, or None, and the seconds that it took."""
    problem, started_s = None, time.thread_time()
    try:
        call(**arguments)
    except (JaxspecError, Stop) as error:
        message = str(error)
        if "\n" in message or len(message) > LONGEST_MESSAGE:
            problem = f"a message of {len(message)}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    return problem, time.thread_time() - started_s


def faults(name, values):
    """What a function does with each value for each parameter, where that is wrong."""
    call, declared, skipped, right = doors()[name]
    found = []
    for parameter in inspect.signature(declared or call).parameters:
        if parameter in ("self", *skipped.split()):
            continue
        for value in values:
            if parameter in ON_HUB and isinstance(value, str | bytes | list):
                continue
            if parameter in CALLED and callable(value):
                continue
            problem, took_s = tried(call, {**right, parameter: value})
            is_limited = name not in COMPILING and parameter not in TIMELESS
            if took_s > LIMIT_S and is_limited:  # perhaps only a garbage collection
                problem, took_s = tried(call, {**right, parameter: value})
                if took_s > LIMIT_S:
                    problem = f"{took_s:.1f} s"
            if problem is not None:
                found.append(f"{parameter}={shown(value)}: {problem}"[:300])
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_IN_GATE])
def test_a_result_or_an_error_of_ours(name):
    assert not faults(name, FEW)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_result_or_an_error_of_ours_for_every_value(name):
    assert not faults(name, VALUES)


FIELDS = tuple(inspect.signature(SamplingParams).parameters)


@given(fields=st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(range(len(VALUES)))))
@settings(max_examples=500, deadline=None)
def test_several_sampling_parameters_at_a_time(fields):
    """Those that are accepted are of the declared types, so that equal ones are one key."""
    try:
        params = SamplingParams(**{name: VALUES[index] for name, index in fields.items()})
    except JaxspecError:
        return
    hash(params)
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        assert type(value) in (int, float, bool, tuple, type(None)), field.name
