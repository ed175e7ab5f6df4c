"""Negative controls: does the auditor catch what published systems do wrong, and only that?

For every fault of `.faults` two runs are compared with the window-1 witness: the
faulty one, and its healthy twin with the same requests in the same engine. A fault counts as caught
if the comparison fails for a reason that is not a tie; a control passes if the fault is caught and
the twin is not accused of anything.

The faults that are edits of a round share one compiled program, in which a number chooses the one
that is on; their healthy twin is that program with none on. The requests are chosen so that each
fault can show: ragged prompts, more requests than rows, rows that accept different numbers,
stop tokens inside accepted drafts and in a prompt, a pad token that occurs in prompts and drafts,
greedy and sampled rows side by side. Faults that no single output can show are judged by a
chi-square test of many rows of a table model against its exact distribution.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.markup import escape
from rich.table import Table
from scipy import stats

from jaxspec import sampling
from jaxspec.audit.controls.faults import FAULTS, Fault, OpenState, installed
from jaxspec.audit.judge import ALPHA, Divergence, Finding, judge
from jaxspec.audit.scoring import Scorer
from jaxspec.cache import pages as kv
from jaxspec.decode.loop import SpeculativeLoop, empty_state
from jaxspec.drafters.base import Drafter, EngineShape, StatelessDrafter
from jaxspec.engine.engine import Engine
from jaxspec.errors import ModelError, SettingError
from jaxspec.models import decoder
from jaxspec.models.base import LanguageModel
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import SAMPLE_PROMPTS, read_prompts
from jaxspec.requests.requests import prompt_token_ids
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.compilation import Program
from jaxspec.runtime.environment import use_compilation_cache
from jaxspec.schedulers import Static
from jaxspec.types import BatchView, Draft, Finish, Origin, RowSampling, chain_parents
from jaxspec.verifiers import Block, Rejection, Verifier

BATCH_SIZE = 3
MAX_LENGTH = 128
DRAFT_LENGTH = 4
WINDOW = DRAFT_LENGTH + 2  # so that drafts have room that nothing fills
PROMPT_LENGTHS = (3, 29, 11, 40, 7, 20, 35)
MAX_TOKENS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlResult:
    """What became of one control.

    Attributes:
      name: of the fault.
      kind: of the fault.
      source: the published systems that had it.
      invariant: what it breaks.
      detection: how it is seen.
      caught: whether it was; of an `efficiency` or `numerics` control, whether its output passed
        and what it costs or changes was seen.
      healthy_passes: whether the same requests pass without the fault.
      detail: what was seen, in words.
      needs_batch: of a `tokens` control that was caught, whether the output that was wrong is right
        when its request is decoded alone: then rows of a batch fell out of step.
    """

    name: str
    kind: str
    source: str
    invariant: str
    detection: str
    caught: bool
    healthy_passes: bool
    detail: str
    needs_batch: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that give every fault the chance to show.

    Attributes:
      prompts: as token ids.
      params: one each.
      pad_token: a token of the prompts that is also drafted and accepted.
    """

    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    pad_token: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Outputs against the witness's.

    Attributes:
      differs: requests whose outputs differ from the witness's.
      judged: those of them that were looked into, up to the first that is no tie.
      num_outputs: outputs compared.
    """

    differs: Sequence[int]
    judged: Mapping[int, Divergence]
    num_outputs: int

    @property
    def wrong(self) -> int | None:
        """The first request whose output is wrong beyond a tie."""
        return next((i for i, d in self.judged.items() if d.finding != Finding.TIE), None)

    @property
    def passes(self) -> bool:
        """Whether every difference is a tie."""
        return self.wrong is None

    def describe(self) -> str:
        """What was found, in words."""
        if not self.differs:
            return f"all {self.num_outputs} outputs equal the witness's"
        if self.wrong is None:
            return f"{len(self.differs)} of {self.num_outputs} outputs differ, all at ties"
        d = self.judged[self.wrong]
        if d.token < 0:
            what = f"ends at token {d.index}, where the witness goes on"
        elif d.expected < 0:
            what = f"goes on at token {d.index}, where the witness has ended"
        else:
            what = (
                f"token {d.index} is {d.token}, not {d.expected} "
                f"(margin {d.margin:.2g}, a tie up to {d.bound:.1g})"
            )
        return (
            f"{len(self.differs)} of {self.num_outputs} outputs differ; request {self.wrong} {what}"
        )


def run_controls(
    target: LanguageModel,
    drafter: Drafter,
    *,
    names: Sequence[str] | None = None,
    prompts: Sequence[Sequence[int]] | None = None,
    scorer: Scorer | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> list[ControlResult]:
    """What became of each control, in the order of `FAULTS`.

    Args:
      target: of the package's own decoder, for the faults reach into it.
      drafter: of chains, right about as often as wrong.
      names: of the faults; default all.
      prompts: seven lists of token ids of different lengths, none above 64 and some of them
        common in what the target writes; default the sample prompts, or random ones for a target
        without a tokenizer.
      scorer: of the target, with room for 128 tokens, if there is one already.
      on_progress: told the name of each control before it is run.

    Raises:
      ModelError: the target is of another decoder.
      SettingError: no such fault.
    """
    if not isinstance(target, LanguageModel):
        raise ModelError(
            f"The target {target.name} was given for the negative controls; they reach into the "
            "package's own decoder, so give a model that load_model returns."
        )
    wanted = list(FAULTS) if names is None else list(names)
    unknown = [name for name in wanted if name not in FAULTS]
    if unknown:
        raise SettingError(f"There is no fault {unknown[0]!r}; choose among {', '.join(FAULTS)}.")
    chosen = [fault for name, fault in FAULTS.items() if name in wanted]
    use_compilation_cache()
    results = []
    bench = None
    for fault in chosen:
        if on_progress is not None:
            on_progress(fault.name)
        if fault.kind == "distribution":
            results.append(run_distribution_control(fault))
            continue
        if bench is None:
            edited = [f for f in chosen if not f.patches and f.kind != "distribution"]
            bench = Bench(target, drafter, faults=edited, prompts=prompts, scorer=scorer)
        results.append(bench.run(fault))
    return results


class Bench:
    """The engines and the requests that all controls of one target share.

    Args:
      target: as in `run_controls`.
      drafter: as in `run_controls`.
      faults: those with edits that will be asked for; they are compiled into one program.
      prompts: as in `run_controls`.
      scorer: as in `run_controls`.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter,
        *,
        faults: Sequence[Fault],
        prompts: Sequence[Sequence[int]] | None = None,
        scorer: Scorer | None = None,
    ):
        self._target, self._drafter = target, drafter
        self._production = self._engine()
        prompts = _prompts(target) if prompts is None else prompts
        with _metered(target) as rows:
            self.workload = _workload(self._production, prompts)
        self._num_rows = max(rows)
        self._scorer = Scorer(target, max_length=MAX_LENGTH) if scorer is None else scorer
        witness = Engine(
            target,
            scheduler=Static(),
            batch_size=BATCH_SIZE,
            max_length=MAX_LENGTH,
            prefill_chunk=16,
        )
        self._witness = self._generate(witness)
        self._generate(self._production)
        self._production_kv = _live_kv(self._production)
        self._faults = list(faults)
        self._switched = None
        if self._faults:
            with installed(self._faults, pad_token=self.workload.pad_token, is_armed=True):
                self._switched = self._engine()
                self._generate(self._switched)  # compiles it while the edits are in place

    def _engine(self) -> Engine:
        return Engine(
            self._target,
            self._drafter,
            scheduler=Static(),  # as in the published systems that had these faults
            draft_length=DRAFT_LENGTH,
            verify_length=WINDOW,
            batch_size=BATCH_SIZE,
            max_length=MAX_LENGTH,
            prefill_chunk=16,
        )

    def _generate(self, engine: Engine) -> list[Completion]:
        return engine.generate(self.workload.prompts, self.workload.params)

    def compare(
        self, completions: Sequence[Completion], *, among: Sequence[int] | None = None
    ) -> Comparison:
        """Outputs of all requests, or of those `among` them, against the witness's."""
        w = self.workload
        among = range(len(w.prompts)) if among is None else among
        differs = [i for i in among if completions[i].token_ids != self._witness[i].token_ids]
        judged: dict[int, Divergence] = {}
        for index in differs:
            divergence = judge(
                self._scorer,
                prompt_ids=w.prompts[index],
                output_ids=completions[index].token_ids,
                reference_ids=self._witness[index].token_ids,
                params=w.params[index],
            )
            assert divergence is not None
            judged[index] = divergence
            if divergence.finding != Finding.TIE:
                break
        return Comparison(differs=differs, judged=judged, num_outputs=len(among))

    def run(self, fault: Fault) -> ControlResult:
        """The result of one control: the healthy twin is run, then the fault, on the same engine
        (or, where the fault is compiled in, on an engine that differs in nothing else)."""
        twin_engine = self._production if fault.patches else self._switched
        if twin_engine is None or not (fault.patches or fault in self._faults):
            raise SettingError(
                f"The fault {fault.name} was asked for, but not compiled into this bench; name it "
                "when the bench is made."
            )
        twin = self._generate(twin_engine)
        twin_kv = _live_kv(twin_engine) if fault.kind == "numerics" else []
        with self._faulty(fault) as engine, _metered(self._target) as rows:
            completions = self._generate(engine)
        num_rows = max(rows, default=self._num_rows)
        healthy = self.compare(twin)
        greedy = [i for i, p in enumerate(self.workload.params) if p.temperature == 0]
        sampled = [i for i, p in enumerate(self.workload.params) if p.temperature > 0]
        needs_batch = None

        if fault.kind == "tokens":
            found = self.compare(completions, among=greedy)
            caught, detail = not found.passes, found.describe()
            if found.wrong is not None:
                needs_batch = self._is_right_alone(fault, found.wrong)
                detail += "; right if decoded alone" if needs_batch else ""
        elif fault.kind == "sampling":
            found = self.compare(completions, among=sampled)
            caught = not found.passes and self.compare(completions, among=greedy).passes
            detail = f"{found.describe()}; greedy rows are right"
        elif fault.kind == "order":
            found = self.compare(completions)
            ours, theirs = (
                collections.Counter(c.token_ids for c in x) for x in (completions, twin)
            )
            caught = not found.passes and ours == theirs
            detail = f"as a set {'equal' if ours == theirs else 'different'}; {found.describe()}"
        elif fault.kind == "efficiency":
            found = self.compare(completions)
            before, after = (_num_rounds(x) for x in (twin, completions))
            caught = found.passes and after * num_rows > before * self._num_rows
            detail = (
                f"{after} rounds instead of {before}, {num_rows} target rows a call instead of "
                f"{self._num_rows}; {found.describe()}"
            )
        else:
            found = self.compare(completions)
            pairs = zip(twin_kv, self._production_kv, strict=True)
            differs = any(not np.array_equal(ours, theirs) for ours, theirs in pairs)
            caught = found.passes and differs
            detail = f"KV {'differs' if differs else 'is equal'} in its bits; {found.describe()}"
        return _result(
            fault,
            caught=caught,
            healthy_passes=healthy.passes,
            detail=detail,
            needs_batch=needs_batch,
        )

    @contextlib.contextmanager
    def _faulty(self, fault: Fault) -> Iterator[Engine]:
        """An engine that has the fault."""
        if not fault.patches:
            engine = self._switched
            assert engine is not None
            _arm(engine, self._faults.index(fault) + 1)
            try:
                yield engine
            finally:
                _arm(engine, 0)
            return
        with fault.apply(pad_token=self.workload.pad_token):
            is_around = all(owner is Engine for owner, _, _ in fault.patches)
            yield self._production if is_around else self._engine()

    def _is_right_alone(self, fault: Fault, index: int) -> bool:
        """Whether a request's output is right when nothing else is in the batch."""
        w = self.workload
        for engine in (self._production, self._switched):
            if engine is not None:
                engine.reset()  # rows that have ended are company too, for a fault
        with self._faulty(fault) as engine:
            alone = engine.generate([w.prompts[index]], w.params[index])
        completions = list(self._witness)
        completions[index] = alone[0]
        return self.compare(completions, among=[index]).passes


def _arm(engine: Engine, number: int) -> None:
    """Turns on the fault of that number, or none."""
    state = engine.state
    assert isinstance(state, OpenState)
    armed = jax.device_put(np.int32(number), state.armed.sharding)
    engine.executor.state = state.replace(armed=armed)


def _result(
    fault: Fault,
    *,
    caught: bool,
    healthy_passes: bool,
    detail: str,
    needs_batch: bool | None = None,
) -> ControlResult:
    return ControlResult(
        name=fault.name,
        kind=fault.kind,
        source=fault.source,
        invariant=fault.invariant,
        detection=fault.detection,
        caught=caught,
        healthy_passes=healthy_passes,
        detail=detail,
        needs_batch=needs_batch,
    )


def _num_rounds(completions: Sequence[Completion]) -> int:
    return sum(completion.acceptance.num_rounds for completion in completions)


@contextlib.contextmanager
def _metered(target: LanguageModel) -> Iterator[list[int]]:
    """Rows of each call of the target's layers that is traced meanwhile."""
    rows: list[int] = []
    real = decoder.run_layers

    def run_layers(config, params, hidden, *arguments, **options):
        if config is target.config:
            rows.append(hidden.shape[0])
        return real(config, params, hidden, *arguments, **options)

    with mock.patch.object(decoder, "run_layers", run_layers):
        yield rows


def _live_kv(engine: Engine) -> list[np.ndarray]:
    """KV of the committed tokens of every row of the batch, layer by layer."""
    state = engine.state
    slot = np.arange(state.cache.capacity, dtype=np.int32)
    slots = jnp.broadcast_to(jnp.asarray(slot), (engine.shape.batch_size, state.cache.capacity))
    is_live = slot < np.asarray(state.num_committed)[:, None] - 1
    parts = []
    for layer in state.cache.layers:
        for part in kv.read_slots(layer, state.cache.table, slots, state.cache.dtype):
            parts.append(np.where(is_live[..., None, None], np.asarray(part, np.float32), 0))
    return parts


# The requests.


def _prompts(target: LanguageModel) -> list[list[int]]:
    """Prompts of `PROMPT_LENGTHS` tokens."""
    if target.tokenizer is None:
        rng = np.random.default_rng(0)
        return [rng.integers(0, target.vocab_size, n).tolist() for n in PROMPT_LENGTHS]
    lines = [line for line in read_prompts(str(SAMPLE_PROMPTS)) if isinstance(line.prompt, str)]
    texts = [list(prompt_token_ids(line.prompt, target, name=line.name)) for line in lines]
    found = []
    for length in PROMPT_LENGTHS:
        index = next(i for i, ids in enumerate(texts) if len(ids) >= length)
        found.append(texts.pop(index)[:length])
    return found


def _workload(engine: Engine, prompts: Sequence[Sequence[int]]) -> Workload:
    """Requests for these prompts; a first run shows where stop tokens and pads have to be."""
    lengths = [len(prompt) for prompt in prompts]
    if len(prompts) <= 2 * BATCH_SIZE or not all(0 < n <= MAX_LENGTH // 2 for n in lengths):
        raise SettingError(
            f"Prompts of {lengths} tokens were given for the negative controls; give at least "
            f"{2 * BATCH_SIZE + 1} of 1 to {MAX_LENGTH // 2} tokens, of different lengths."
        )
    greedy = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    params = [greedy] * len(prompts)
    params[2] = dataclasses.replace(greedy, temperature=1.2, top_k=4, seed=11)
    params[5] = dataclasses.replace(greedy, temperature=1.2, top_p=0.5, seed=12)
    completions = engine.generate(prompts, params)
    accepted: collections.Counter[int] = collections.Counter()
    num_stops = 0
    for index, completion in enumerate(completions):
        if params[index].temperature > 0:
            continue
        output = completion.token_ids
        for place, origin in enumerate(completion.origins):
            if origin == Origin.ACCEPTED:
                accepted[output[place]] += 1
        inside = _first_new_accepted(completion)
        if inside is not None and num_stops < 2:
            params[index] = dataclasses.replace(greedy, stop_token_ids=(inside,))
            num_stops += 1
            continue
        unheard = [token for token in prompts[index] if token not in output]
        if unheard:
            params[index] = dataclasses.replace(greedy, stop_token_ids=(unheard[0],))
    in_prompts = {token for prompt in prompts for token in prompt}
    common = [token for token, _ in accepted.most_common() if token in in_prompts]
    if not common or num_stops == 0:
        raise SettingError(
            f"Of the drafts for these {len(prompts)} prompts no token was accepted that could be "
            "the pad and a stop token; give a drafter that is right more often."
        )
    return Workload(prompts=prompts, params=params, pad_token=common[0])


def _first_new_accepted(completion: Completion) -> int | None:
    """The first accepted token, not too early, that the output has not held before it."""
    for place in range(4, len(completion.token_ids) - 1):
        token = completion.token_ids[place]
        is_new = token not in completion.token_ids[:place]
        if completion.origins[place] == Origin.ACCEPTED and is_new:
            return token
    return None


# Distributions.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TableModel:
    """A model whose next token depends on the last one only: its distribution is known exactly.

    Attributes:
      params: `[V, V]` fp32 logits of the next token, by the last one.
      vocab_size: V.
    """

    params: jax.Array
    vocab_size: int
    name: str = "table"
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None

    def init_cache(self, num_rows: int, capacity: int) -> Any:
        """Nothing to remember."""
        return ()

    def forward(self, params, tokens, window, cache):
        """The tokens themselves, `[B, T, 1]`."""
        return tokens[..., None], cache

    def logits(self, params, hidden):
        """Logits `[..., V]` fp32."""
        return params[hidden[..., 0]]


@dataclasses.dataclass(frozen=True, eq=False)
class TableDrafter(StatelessDrafter):
    """Samples chains from a table."""

    params: jax.Array
    name: str = "table"

    def propose(self, shape: EngineShape, params, state, rows: BatchView):
        """A chain, drawn as the row draws its own tokens."""
        newest = jnp.take_along_axis(rows.tokens, rows.num_committed[:, None] - 1, axis=1)[:, 0]

        def step(node, carry):
            last, tokens, distributions = carry
            token, q, _ = sampling.draw_draft(
                params[last],
                rows,
                tokens,
                node,
                vocab_size=shape.vocab_size,
                is_noise_shared=shape.is_noise_shared,
                needs_probs=True,
            )
            assert q is not None
            tokens = lax.dynamic_update_slice_in_dim(tokens, token[:, None], node, axis=1)
            distributions = lax.dynamic_update_slice_in_dim(distributions, q[:, None], node, axis=1)
            return token, tokens, distributions

        tokens = jnp.zeros((shape.batch_size, shape.num_nodes), jnp.int32)
        distributions = jnp.zeros((*tokens.shape, shape.vocab_size), jnp.float32)
        carry = (newest, tokens, distributions)
        _, tokens, distributions = lax.fori_loop(jnp.int32(0), shape.num_nodes, step, carry)
        draft = Draft(
            tokens=tokens,
            parents=chain_parents(shape.batch_size, shape.num_nodes),
            num_valid=jnp.minimum(rows.draft_limit, shape.num_nodes),
            q=distributions,
        )
        return draft, state


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributionScene:
    """Many rows that decode a table model, and the distribution that their outputs must follow.

    Attributes:
      verifier: a lossless one.
      p: `[V, V]` logits of the target.
      q: `[V, V]` logits of the drafter.
      temperature: of every row.
      top_p: of every row.
      num_nodes: drafts of a round.
      num_tokens: of each output.
      num_rows: outputs.
    """

    verifier: Verifier
    p: np.ndarray
    q: np.ndarray
    temperature: float = 1.0
    top_p: float = 1.0
    num_nodes: int = 3
    num_tokens: int = 5
    num_rows: int = 40_000

    def outputs(self) -> np.ndarray:
        """`[num_rows, num_tokens]`, by the production round."""
        size = self.p.shape[0]
        table = TableModel(params=jnp.asarray(self.p, jnp.float32), vocab_size=size)
        shape = EngineShape(
            batch_size=self.num_rows,
            max_length=1 + self.num_tokens + self.num_nodes,
            verify_length=1 + self.num_nodes,
            prefill_chunk=1,
            vocab_size=size,
            is_noise_shared=self.verifier.is_noise_shared,
            needs_draft_probs=self.verifier.needs_draft_probs,
        )
        loop = SpeculativeLoop(
            target=table,
            drafter=TableDrafter(jnp.asarray(self.q, jnp.float32)),
            verifier=self.verifier,
            scheduler=Static(),
            shape=shape,
            num_stop_tokens=1,
        )
        state = empty_state(shape, num_stop_tokens=1, cache=(), drafter=())
        every = jnp.ones((self.num_rows,), jnp.int32)
        values = self._sampling(every)
        state = state.replace(
            finish=0 * every + Finish.RUNNING,
            num_committed=every,
            limit=every * (1 + self.num_tokens),
            limit_finish=0 * every + Finish.MAX_TOKENS,
            draft_limit=every * self.num_nodes,
            sampling=values,
        )
        run = Program(jax.jit(loop.run), f"the decode round of {self.num_rows} tiny rows")
        state = run(loop.params, state, jnp.int32(self.num_tokens), jnp.int32(1))
        return np.asarray(state.tokens[:, 1 : 1 + self.num_tokens])

    def _sampling(self, every: jax.Array) -> RowSampling:
        """A key per row, and the same filters for all."""
        numbers = jnp.arange(every.shape[0], dtype=jnp.uint32)
        floats = every.astype(jnp.float32)
        return RowSampling(
            temperature=floats * self.temperature,
            top_k=every * 0,
            top_p=floats * self.top_p,
            min_p=floats * 0,
            repetition_penalty=floats,
            presence_penalty=floats * 0,
            frequency_penalty=floats * 0,
            key=jnp.stack([jnp.zeros_like(numbers), numbers], axis=1),
            prompt_length=every,
            min_length=every,
        )

    def distribution(self) -> np.ndarray:
        """`[V] * num_tokens` probabilities of the outputs that start after token 0, by hand."""
        step = np.exp(self.p / self.temperature)
        step /= step.sum(axis=1, keepdims=True)
        for row in step:
            order = np.argsort(-row)
            before = np.cumsum(row[order]) - row[order]
            row[order[before >= self.top_p]] = 0
        step /= step.sum(axis=1, keepdims=True)
        distribution = step[0]
        for _ in range(self.num_tokens - 1):
            distribution = distribution[..., None] * step
        return distribution

    def p_value(self) -> float:
        """Probability of outputs at least this far from the distribution, if they were drawn from
        it."""
        distribution, size = self.distribution().reshape(-1), self.p.shape[0]
        outputs = self.outputs()
        code = np.ravel_multi_index(tuple(outputs.T), (size,) * self.num_tokens)
        observed = np.bincount(code, minlength=distribution.size)
        if np.any(observed[distribution == 0]):
            return 0.0
        expected = distribution * self.num_rows
        is_rare = expected < 5  # one cell together: chi-square wants expected counts
        cells = [np.append(x[~is_rare], x[is_rare].sum()) for x in (observed, expected)]
        is_cell = cells[1] > 0
        return float(stats.chisquare(cells[0][is_cell], cells[1][is_cell]).pvalue)


def _distribution_scene(fault: Fault) -> DistributionScene:
    """The scene that shows a distribution fault."""
    if fault.name == "position_only_keys":
        # Memoryless distributions; the bias under such keys was measured for these.
        p, q = np.log([[0.7, 0.3]] * 2), np.log([[0.35, 0.65]] * 2)
        return DistributionScene(verifier=Block(), p=p, q=q)
    rng = np.random.default_rng(5)
    p, q = rng.normal(size=(2, 4, 4))
    return DistributionScene(
        verifier=Rejection(), p=p, q=q, temperature=1.5, top_p=0.85, num_nodes=2, num_tokens=4
    )


@functools.cache
def _healthy_p_value(scene_of: str) -> float:
    return _distribution_scene(FAULTS[scene_of]).p_value()


def run_distribution_control(fault: Fault) -> ControlResult:
    """The result of one control of kind `distribution`; it needs no model."""
    # Faults other than the block verifier's share a scene, so also its healthy run.
    scene_of = fault.name if fault.name == "position_only_keys" else "one_stream"
    healthy = _healthy_p_value(scene_of)
    scene = _distribution_scene(fault)
    with fault.apply():
        faulty = scene.p_value()
    return _result(
        fault,
        caught=faulty < ALPHA,
        healthy_passes=healthy >= ALPHA,
        detail=(
            f"p-value {faulty:.2g} against {healthy:.2g} of the healthy run, alpha {ALPHA:g}, "
            f"{scene.num_rows} outputs under {scene.verifier.name}"
        ),
    )


# Reports.


def controls_json(results: Sequence[ControlResult]) -> list[dict[str, Any]]:
    """The list `controls` of a report."""
    return [result.to_json() for result in results]


def controls_table(results: Sequence[ControlResult], *, has_details: bool = False) -> Table:
    """The results as a table for the terminal.

    Args:
      results: in the order of `FAULTS`, so that those of a kind stand together.
      has_details: adds what was seen of each.
    """
    table = Table(title="Negative controls: each fault, and the same run without it")
    table.add_column("fault", style="bold")
    table.add_column("as in")
    table.add_column("breaks")
    table.add_column("auditor")
    table.add_column("healthy twin")
    if has_details:
        table.add_column("seen")
    for kind, group in itertools.groupby(results, key=lambda result: result.kind):
        good = {"efficiency": "passes, cost seen", "numerics": "passes"}.get(kind, "caught")
        for result in group:
            cells = [
                result.name.replace("_", " "),
                result.source,
                result.invariant,
                f"[green]{good}[/]" if result.caught else "[bold red]MISSED[/]",
                "[green]passes[/]" if result.healthy_passes else "[bold red]FAILS[/]",
            ]
            table.add_row(*cells, *([escape(result.detail)] if has_details else []))
        table.add_section()
    return table
