"""Runs on disk: what an engine was, what it was given, and what it did.

A directory of a run holds

    jaxspec.json        settings, versions, digests of weights, checksums of the other files
    completions.jsonl   prompts, sampling parameters and outputs, a line for each completion
    rounds.parquet      `Completions.rounds`, if rounds were traced
    tokens.parquet      `Completions.tokens`, if tokens were
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxspec import schedulers, verifiers
from jaxspec.checkpoint.format import weights_digest
from jaxspec.checkpoint.manifest import (
    RUN,
    RunManifest,
    checksums,
    kind_of,
    read_record,
    verified,
    write_record,
)
from jaxspec.errors import DamagedError, SettingError
from jaxspec.models.prefill import CHUNK
from jaxspec.requests.completions import LEAST_LOGPROB, Completion, Completions
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.directories import atomic_directory, finish_interrupted
from jaxspec.runtime.documents import as_json, json_text
from jaxspec.runtime.environment import provenance
from jaxspec.runtime.extras import import_extra
from jaxspec.runtime.files import expand_user, reading
from jaxspec.telemetry.counters import Acceptance
from jaxspec.telemetry.frames import token_texts
from jaxspec.types import Origin, PyTree

if TYPE_CHECKING:
    import pandas

    from jaxspec.models.tokenizer import TextTokenizer

_log = logging.getLogger(__name__)

COMPLETIONS = "completions.jsonl"
_NOT_STORED = ("budget_bytes", "mesh")  # of one machine; `batch_size` is what came of them


class RunSaver:
    """`Completions.save` for what an engine generated. It keeps neither the engine nor its weights.

    Args:
      engine: the `Engine`.
      **settings: of `generate`, besides prompts and sampling parameters.
    """

    def __init__(self, engine: Any, **settings: Any):
        self._engine, self._settings = weakref.ref(engine), settings
        self._num_updates = engine.num_updates

    def __call__(
        self,
        completions: Completions,
        directory: str | os.PathLike,
        *,
        overwrite: bool,
        columns: Mapping[str, Iterable[Any]],
    ) -> None:
        """Writes the directory; see `Completions.save`."""
        engine = self._engine()
        if engine is None or engine.num_updates != self._num_updates:
            what = "is gone" if engine is None else "has other weights now"
            raise SettingError(
                f"The engine that made these completions {what}, and a saved run names its "
                "settings and weights; save a run while its engine is as it was."
            )
        tables = {}
        traces = [one.trace for one in completions if one.trace is not None]
        if columns or traces:
            import_extra("pyarrow", "saved runs")
            tables["rounds"] = completions.rounds(**columns)
            if all(trace.tokens is not None for trace in traces):
                tables["tokens"] = completions.tokens(tokenizer=None, **columns)
        run = run_fields(engine, completions, **self._settings)
        with atomic_directory(
            expand_user(directory), overwrite=overwrite, may_replace=lambda old: kind_of(old) == RUN
        ) as partial:
            for name, frame in tables.items():
                try:
                    frame.to_parquet(partial / f"{name}.parquet", engine="pyarrow", index=False)
                except (TypeError, ValueError, NotImplementedError) as error:
                    raise SettingError(
                        f"Parquet has no type for a column ({error!s:.200}); give columns of "
                        "texts or of numbers."
                    ) from error
            lines = [json_text(_line(completion)) + "\n" for completion in completions]
            (partial / COMPLETIONS).write_text("".join(lines), encoding="utf-8")
            write_record(partial, RunManifest(run=run, files=checksums(partial)))


def run_fields(engine: Any, completions: Sequence[Completion], **settings: Any) -> dict[str, Any]:
    """What a manifest says of completions of an `Engine`, whose weights are read, as JSON values:
    `settings` (keywords of `Engine`), `generate` (of `generate`, given as **settings), `engine`
    (`Engine.describe`), `sampling` (the sampling parameters that were used, without seeds), `seeds`
    (of each completion), `weights` (for target and drafter `name`, `digest` and `dtypes`),
    `versions`, `devices`, `commit` and `date`."""
    config = {
        field.name: getattr(engine.config, field.name)
        for field in dataclasses.fields(engine.config)
        if field.name not in _NOT_STORED
    }
    config |= {"verifier": _described(engine.verifier), "scheduler": _described(engine.scheduler)}
    if engine.mesh is None:
        config["batch_size"] = engine.shape.batch_size
    sampling = [_fields_of(one.sampling_params) for one in completions]
    seeds = [each.pop("seed") for each in sampling]
    described = engine.describe()
    parts = [(name, engine.executor.params[name]) for name in ("target", "drafter")]
    return as_json(
        {
            "settings": config,
            "generate": settings,
            "engine": described,
            "sampling": list({json_text(each): each for each in sampling}.values()),
            "seeds": seeds,
            "weights": {part: {"name": described[part], **_weights(own)} for part, own in parts},
            **provenance(),
        }
    )


def _weights(params: PyTree) -> dict[str, Any]:
    """The digest of parameters, None if there are none, and their dtypes."""
    leaves = jax.tree.leaves(params)
    digest = weights_digest(params) if leaves else None
    return {"digest": digest, "dtypes": sorted({str(leaf.dtype) for leaf in leaves})}


def _fields_of(params: SamplingParams | None) -> dict[str, Any]:
    assert params is not None, "every completion of an engine has them"
    return dataclasses.asdict(params)


def _described(rule: Any) -> dict[str, Any]:
    """The class and the fields of a verifier or a scheduler."""
    fields = dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ()
    own = {field.name: getattr(rule, field.name) for field in fields if field.init}
    return {"class": type(rule).__name__, **own}


def _line(completion: Completion) -> dict[str, Any]:
    """A line of `completions.jsonl`."""
    return {
        **completion.to_json(),
        "sampling_params": _fields_of(completion.sampling_params),
        "origins": completion.origins,
        "pieces": list(completion.pieces),
    }


def _completion(line: dict[str, Any]) -> Completion:
    """The completion that a line describes."""
    line = {
        name: tuple(value) if isinstance(value, list) else value for name, value in line.items()
    }
    counts: dict[str, Any] = {
        each.name: line["acceptance"][each.name] for each in dataclasses.fields(Acceptance)
    }
    counts = {name: tuple(n) if isinstance(n, list) else n for name, n in counts.items()}
    line |= {
        "acceptance": Acceptance(**counts),
        "origins": tuple(map(Origin, line["origins"])),
        "sampling_params": SamplingParams(**line["sampling_params"]),
    }
    for name in {"logprobs", "prompt_logprobs"} & set(line):
        line[name] = tuple(
            each
            and {int(token): -math.inf if n <= LEAST_LOGPROB else n for token, n in each.items()}
            for each in line[name]
        )
    return Completion(**line)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SavedRun:
    """A run that `Completions.save` wrote. To decode it again:

        engine = jaxspec.Engine(target, drafter, **run.engine_settings)
        run.check_weights(engine)
        again = engine.generate(run.prompts, run.sampling_params, **run.manifest["generate"])

    Attributes:
      directory: where it is.
      manifest: see `run_fields`.
      completions: as they were saved, without their traces.
    """

    directory: Path
    manifest: dict[str, Any]
    completions: Completions

    def __repr__(self) -> str:
        return f"<Saved run in {self.directory}: {self.completions.summary}>"

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each completion's prompt."""
        return [list(one.prompt_token_ids) for one in self.completions]

    @property
    def sampling_params(self) -> list[SamplingParams]:
        """The sampling parameters of each completion, with its own seed and `n` 1."""
        return [one.sampling_params for one in self.completions if one.sampling_params is not None]

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The keywords of `Engine` besides target and drafter; a mesh is not among them.

        Raises:
          SettingError: the verifier or the scheduler is not one of jaxspec's.
        """
        settings = dict(self.manifest["settings"])
        chunk = settings.pop("prefill_chunk", None)  # a setting once
        if chunk not in (None, CHUNK):
            _log.warning(
                "the run in %s read its prompts in chunks of %d tokens, and they are read in "
                "chunks of %d now; with kernels whose bits depend on the width, tokens may differ "
                "at ties",
                *(self.directory, chunk, CHUNK),
            )
        for name, room in (("verifier", verifiers), ("scheduler", schedulers)):
            fields = dict(settings[name])
            rule = getattr(room, fields.pop("class"), None)
            if rule is None:
                raise SettingError(
                    f"The run's {name} {settings[name]['class']} is not one of jaxspec's; take "
                    "manifest['settings'], and give Engine yours."
                )
            settings[name] = rule(**fields)
        return settings

    def check_weights(self, engine: Any) -> None:
        """Raises `SettingError` unless an engine decodes with the weights of the run."""
        for part, own in self.manifest["weights"].items():
            found = _weights(engine.executor.params[part])["digest"]
            if found != own["digest"]:
                raise SettingError(
                    f"The {part} of the engine has weights with the digest {found}, and the run's "
                    f"{part} {own['name']} has {own['digest']}; load the run's own."
                )

    def rounds(self) -> pandas.DataFrame:
        """The frame of `Completions.rounds`, with the columns that it was saved with.

        Raises:
          SettingError: rounds were not recorded; pandas or pyarrow is not installed.
          DamagedError: the file cannot be read.
        """
        return self._table("rounds")

    def tokens(self, *, tokenizer: TextTokenizer | None = None) -> pandas.DataFrame:
        """The frame of `Completions.tokens`; raises what `rounds` raises."""
        frame = self._table("tokens")
        return frame if tokenizer is None else frame.assign(**token_texts(frame, tokenizer.texts))

    def _table(self, name: str) -> pandas.DataFrame:
        path = self.directory / f"{name}.parquet"
        if not path.exists():
            raise SettingError(
                f"The run in {self.directory} has no {name}; make the engine with trace={name!r}."
            )
        import_extra("pyarrow", "saved runs")
        with _reading(path):
            return import_extra("pandas", "saved runs").read_parquet(path, engine="pyarrow")


def _reading(path: Path) -> Any:
    def damaged(reason: str) -> DamagedError:
        return DamagedError(f"{path} cannot be read ({reason}); save the run again.")

    return reading(path, damaged)


def load_run(directory: str | os.PathLike) -> SavedRun:
    """The run in a directory that `Completions.save` wrote; every file is compared with its
    checksum.

    Raises:
      DamagedError: a file is missing, malformed, or has changed since it was written.
      CheckpointError: it holds something else, or another version of jaxspec wrote it.
      UnreadableError: the system does not let this process read a file.
    """
    path = expand_user(directory)
    finish_interrupted(path)
    manifest = read_record(path, RunManifest, lambda _: None, kind=RUN)
    with verified(path, manifest), _reading(path / COMPLETIONS):
        lines = (path / COMPLETIONS).read_text(encoding="utf-8").splitlines()
        completions = Completions(_completion(json.loads(line)) for line in lines)
    return SavedRun(directory=path, manifest=manifest.run, completions=completions)
