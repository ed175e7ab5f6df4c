"""Common parts of all benches: options, document, rows in mid-decode.

A bench is a function that returns the contents of a document, and whose parameters are the options
on the command line (`case`); or, if it has more than that, a dataclass with these options as fields
and a method `measure`. Programs that are timed against each other run in alternation
(`runtime.turns`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import pathlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console

from jaxspec.engine.engine import Engine
from jaxspec.engine.executor import Executor
from jaxspec.errors import SettingError
from jaxspec.lab.comparison import Candidate
from jaxspec.load.models import load_packed
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.registry import PRESETS
from jaxspec.requests.completions import Completion
from jaxspec.requests.requests import make_requests
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.directories import check_can_write
from jaxspec.runtime.documents import make_document, public_name, write_document
from jaxspec.runtime.locks import only_writer
from jaxspec.runtime.options import LARGEST_NUMBER, check_between, check_counts
from jaxspec.runtime.report import Columns, TextTable, check_can_plot
from jaxspec.types import Finish, PyTree

Say: TypeAlias = Callable[[str], None]
Stage: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Run: TypeAlias = Callable[[int], None]
Measure: TypeAlias = Callable[..., dict[str, Any]]
Tables: TypeAlias = Mapping[str, tuple[str, Columns]]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

NOT_OF_THE_RESULT = ("out", "json", "plot", "resume")
ALARM = "Some outputs are not those of plain decoding: this is a bug."


@contextlib.contextmanager
def only_run_into(out: pathlib.Path | None) -> Iterator[None]:
    """Excludes other processes from running a bench with the same `--out` while the block runs;
    does nothing without `--out`.

    Raises:
      SettingError: another process is running one, or the directory of `out` cannot be written.
    """
    with contextlib.ExitStack() as stack:
        if out is not None:
            out = out.resolve()
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(only_writer(out, during="run"))
            except OSError as error:
                raise SettingError(
                    f"{out} cannot be written ({error.strerror}); name another --out."
                ) from error
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Base class of benches: shared options, and the JSON document.

    Attributes:
      COMMAND: the command that it is a subcommand of.
      NAME: the name of the subcommand.
      TABLES: titles and columns of the tables, by the field of the document that they show; a table
        whose field is missing is left out.
      MAY_BE_ZERO: whole numbers that are no counts, such as seeds.
    """

    COMMAND: ClassVar[str] = "bench"
    NAME: ClassVar[str]
    TABLES: ClassVar[Tables] = {}
    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ()

    out: pathlib.Path | None = None
    """JSON file to write."""
    json: bool = False
    """End with one line of JSON on standard output."""

    def run(self, console: Console) -> dict[str, Any]:
        """Measures, writes the file and prints the tables; returns the JSON document."""
        self.check()
        with only_run_into(self.out):
            document = self.document(**self.measure())
            if self.out is not None:
                write_document(document, self.out)
        self.show(document, console)
        return document

    def check(self) -> None:
        """Raises `SettingError` for options that nothing can be measured with, and for files that
        cannot be written. It is called before a model is loaded."""
        hints = typing.get_type_hints(type(self))
        counts = [
            field.name
            for field in dataclasses.fields(self)
            if field.name not in self.MAY_BE_ZERO and is_of_integers(hints[field.name])
        ]
        check_counts(self, *counts)
        for name in self.MAY_BE_ZERO:
            value = getattr(self, name)
            for each in value if isinstance(value, tuple) else (value,):
                check_between(f"--{name.replace('_', '-')}", each, 0, LARGEST_NUMBER)
        if (temperature := getattr(self, "temperature", None)) is not None:
            SamplingParams(temperature=temperature)
        if (oracle := getattr(self, "oracle", None)) is not None:
            check_between("--oracle", oracle, 0, 1)
        self.check_out()
        if (plot := getattr(self, "plot", None)) is not None:
            check_can_plot(plot)

    def check_out(self) -> None:
        """Raises `SettingError` if `out` cannot be written."""
        if self.out is not None:
            check_can_write(self.out)

    def show(self, document: Mapping[str, Any], console: Console) -> None:
        """Prints the tables and remarks of a document."""
        for table in self.tables(document):
            console.print(table)
        for text, style in self.remarks(document):
            console.print(text, style=style, highlight=False)

    def measure(self) -> dict[str, Any]:
        """The contents of the document, other than options and origin."""
        raise NotImplementedError

    def tables(self, document: Mapping[str, Any]) -> list[TextTable]:
        """The tables that are printed for a document: by default those of `TABLES`."""
        return [
            TextTable.of_columns(title, columns, document[field])
            for field, (title, columns) in self.TABLES.items()
            if field in document
        ]

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Sentences below the tables, and their styles: the document's `notes`, and an alarm unless
        what it `holds` is true."""
        found = [(sentence, "dim") for sentence in document.get("notes", ())]
        return found if document.get("holds", True) else [*found, (ALARM, "bold red")]

    def document(self, **fields: Any) -> dict[str, Any]:
        """The JSON document. It names no directory of this machine."""
        document = make_document(f"{self.COMMAND} {self.NAME}", self, **fields)
        config = {
            name: public_name(value) if isinstance(value, str) else value
            for name, value in document["config"].items()
            if name not in NOT_OF_THE_RESULT
        }
        if config.get("prompts", "") is None:
            config["prompts"] = "sample prompts"
        return document | {"config": config}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairBench(Bench):
    """A bench of a target and its draft model."""

    target: str = "demo-target"
    """Any model that `load_model` takes."""
    draft: str = "demo-draft"
    """Its draft model, named in the same way."""
    dtype: Dtype | None = "float32"
    """Dtype of parameters, compute and cache."""

    def load(self) -> tuple[LanguageModel, LanguageModel]:
        """Both models."""
        return load_packed(self.target, dtype=self.dtype), load_packed(self.draft, dtype=self.dtype)


def is_of_integers(hint: Any) -> bool:
    """Whether a field with this type holds whole numbers: one, several, or perhaps none."""
    return hint is int or int in typing.get_args(hint)


def case(name: str, tables: Tables) -> Callable[[Measure], Callable[..., Bench]]:
    """Makes a function the bench `jaxspec bench NAME`.

    The function returns the contents of the document. Its parameters, which all have defaults, are
    the options, and its docstring describes them.

    Args:
      name: that of the subcommand.
      tables: see `Bench`.
    """

    def make(function: Measure) -> Callable[..., Bench]:
        hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters

        def measure(bench: Bench) -> dict[str, Any]:
            return function(**{option: getattr(bench, option) for option in parameters})

        return dataclasses.make_dataclass(
            function.__name__,
            [(option, hints[option], each.default) for option, each in parameters.items()],
            bases=(Bench,),
            namespace={
                "__doc__": function.__doc__,
                "__module__": function.__module__,
                "NAME": name,
                "TABLES": tables,
                "measure": measure,
            },
            frozen=True,
            kw_only=True,
        )

    return make


# ---- parts of a round


class Repeated:
    """A stage that can be run `num_times` in one compiled loop.

    Args:
      stage: `(params, fixed, moving) -> (moving, outputs)`.
      params: those of the models.
      fixed: inputs that are the same in every repetition.
      moving: what the stage updates in place (caches); the caller's arrays are donated.
      what: its name in compilation messages; default the stage's name.

    Attributes:
      fixed: the inputs; may be replaced by others of the same shapes.
    """

    def __init__(
        self, stage: Stage, params: PyTree, fixed: PyTree, moving: PyTree, *, what: str = ""
    ):
        self._params, self.fixed, self._moving = params, fixed, moving

        @functools.partial(jax.jit, donate_argnums=2)
        def program(params, fixed, moving, num_times):
            shapes = jax.eval_shape(stage, params, fixed, moving)[1]
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

            def body(index, carry):
                return stage(params, changing(fixed, index), carry[0])

            return lax.fori_loop(0, num_times, body, (moving, nothing))

        name = stage.__name__.replace("_", " ")
        self._program = Program(program, what or f"the {name}, to be timed by itself")

    def __call__(self, num_times: int) -> None:
        """Runs the stage this many times and waits for it."""
        self._moving, outputs = self._program(self._params, self.fixed, self._moving, num_times)
        jax.block_until_ready((self._moving, outputs))


def changing(tree: PyTree, index: jax.Array) -> PyTree:
    """The same values, which look different to the compiler in every iteration `index` of a loop.

    Otherwise the compiler moves what does not change out of a loop, even with optimisation barriers
    (XLA:CPU drops them first).
    """
    zero = jnp.minimum(index, 0)

    def change(leaf: jax.Array) -> jax.Array:
        return leaf ^ (zero < 0) if leaf.dtype == bool else leaf + zero.astype(leaf.dtype)

    return jax.tree.map(change, tree)


# ---- rows in mid-decode


def tiny_config(num_layers: int, *, width: int = 64, max_length: int = 1024) -> ModelConfig:
    """An architecture so small that only its number of layers matters for its cost."""
    return dataclasses.replace(
        PRESETS["qwen3-8b"],
        vocab_size=512,
        width=width,
        feed_forward_width=2 * width,
        num_layers=num_layers,
        num_query_heads=4,
        num_kv_heads=2,
        head_size=width // 4,
        max_length=max_length,
        rope=RopeConfig(theta=1e4, rotary_size=width // 4),
    )


def random_prompts(model: Model, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """The same random token ids at every call."""
    random = np.random.default_rng(0)
    return random.integers(0, model.vocab_size, (num_prompts, num_tokens)).tolist()


def fill(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    draft_length: int,
    reads: bool = True,
) -> None:
    """Puts a prompt into every row of an executor.

    Args:
      executor: an executor, whose rows are overwritten.
      prompts: token ids, repeated until they fill the rows.
      params: those of every row.
      draft_length: tokens drafted per round; 0 decodes plainly.
      reads: whether to prefill prompts; if False, rows continue after a context that the cache does
        not hold, which costs the same as any other context.
    """
    chosen = list(itertools.islice(itertools.cycle(prompts), executor.num_rows))
    target = executor.parts.target
    requests = make_requests(chosen, params, target, longest=executor.longest_prompt)
    for row, request in enumerate(requests):
        executor.admit(row, request, draft_length=draft_length, arrival=row)
    if reads:
        executor.prefill(prompt_chunks(executor, map(len, chosen)))
    else:
        state = executor.state
        executor.state = state.replace(finish=jnp.full_like(state.finish, Finish.RUNNING))
    jax.block_until_ready(executor.state)


def prompt_chunks(executor: Executor, lengths: Iterable[int]) -> list[tuple[int, int]]:
    """The chunks `(row, start)` of the prompts of these lengths, one in each row from the first."""
    chunk = executor.shape.prefill_chunk
    return [(row, at) for row, length in enumerate(lengths) for at in range(0, length - 1, chunk)]


def fill_mid_decode(
    executor: Executor, prompts: Sequence[Sequence[int]], *, num_tokens: int, draft_length: int
) -> None:
    """Fills every row, decodes `num_tokens` in each, and then lets the rows run with all remaining
    room.

    Args:
      executor: one whose scheduler keeps every row in the batch.
      prompts: token ids, repeated until they fill the rows.
      num_tokens: number of tokens that every row emits first.
      draft_length: draft length after that; 0 decodes plainly.
    """
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    fill(executor, prompts, params, draft_length=executor.shape.verify_length - 1)
    executor.run(num_tokens)
    state = executor.state
    executor.state = state.replace(
        finish=jnp.full_like(state.finish, Finish.RUNNING),
        limit=jnp.full_like(state.limit, executor.longest_prompt + 1),
        draft_limit=jnp.full_like(state.draft_limit, draft_length),
        stop_tokens=jnp.full_like(state.stop_tokens, -1),
    )
    if "lag" in executor.programs:
        # The last round of a row that has room for one token drafts nothing, so the drafter lags.
        executor.catch_up(dict(enumerate(executor.lags().tolist())))


def run_rounds(executor: Executor, num_rounds: int) -> None:
    """Runs rounds and waits for them."""
    executor.run(num_rounds)
    jax.block_until_ready(executor.state)


def over_outputs(
    of_row: Callable[[PyTree, jax.Array], jax.Array],
    params: PyTree,
    completions: Sequence[Completion],
    what: str,
) -> list[np.ndarray]:
    """A value for each token of each completion, `[n]`, computed at the position before it.

    Args:
      of_row: from parameters and tokens `[1, S]` to a value for each position, `[S]`.
      params: the parameters.
      completions: outputs of one model.
      what: the name of the program in compilation messages.
    """
    program = Program(jax.jit(of_row), what)
    longest = max(len(done.prompt_token_ids + done.token_ids) for done in completions)
    found = []
    for done in completions:
        ids, first = done.prompt_token_ids + done.token_ids, len(done.prompt_token_ids)
        tokens = np.pad(np.array([ids], np.int32), ((0, 0), (0, longest - len(ids))))
        found.append(np.asarray(program(params, tokens))[first - 1 : len(ids) - 1])
    return found


def of_best_fixed(found: Sequence[Candidate], engines: Iterable[Engine]) -> dict[str, float | None]:
    """Speed of each engine with automatic draft length over that of the fastest other engine: the
    median over turns, by label; None for the others.

    Args:
      found: the engines' runs, in their order.
      engines: those engines.
    """
    is_adaptive = [engine.adaptive is not None for engine in engines]
    fixed = [own for own, adapts in zip(found, is_adaptive, strict=True) if not adapts]
    best = max(fixed, key=lambda own: own.tokens_per_s)
    return {
        own.label: float(np.median(own.speedups(best))) if adapts else None
        for own, adapts in zip(found, is_adaptive, strict=True)
    }


def peak_bytes() -> int | None:
    """Peak bytes in use on the device in this process, if the device reports them."""
    found = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return None if found is None else int(found)
