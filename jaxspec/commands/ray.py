"""`jaxspec generate --ray`: prompts over the actors of a Ray cluster, and Parquet files of rows."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import pathlib
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxspec.commands.outputs import only_writer_of
from jaxspec.commands.progress import working
from jaxspec.engine.engine import Engine
from jaxspec.errors import SettingError
from jaxspec.interop.ray import predict, ray
from jaxspec.runtime.directories import check_can_write_into, write_atomically
from jaxspec.telemetry.counters import Acceptance

TEXTS = ("request", "prompt", "messages", "params")
SCHEMA = pyarrow.schema(
    [("id", pyarrow.int64()), ("prompt_token_ids", pyarrow.list_(pyarrow.int64()))]
    + [(name, pyarrow.string()) for name in TEXTS]
)
COUNTS = [field.name for field in dataclasses.fields(Acceptance)]
# An actor takes the rows of so many of its engine's batches at a time; while the last of them run,
# other rows of the engine are idle.
BATCHES = 8


def row_of(
    index: int, prompt: Any, params: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A row of the input; `request` is a digest of prompt, parameters and the run's settings."""
    row = {"id": index, "params": json.dumps(params)}
    decisive = json.dumps([prompt, params, settings])
    row["request"] = hashlib.sha256(decisive.encode()).hexdigest()[:16]
    if isinstance(prompt[0], Mapping):
        return row | {"messages": json.dumps(prompt)}
    return row | {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def decode(
    rows: Sequence[Mapping[str, Any]],
    directory: pathlib.Path,
    make_engine: Callable[[], Engine],
    *,
    address: str,
    num_replicas: int,
    batch_size: int,
    mixed_nodes: bool,
    resume: bool,
    **settings: Any,
) -> tuple[list[dict[str, Any]], int]:
    """Decodes the rows that a directory does not hold yet, and writes a file for each batch.

    Args:
      rows: see `row_of`; the ids differ.
      directory: of the output.
      make_engine: makes the engine of an actor.
      address: of the cluster; `local` starts one on this machine.
      num_replicas: actors.
      batch_size: that of the engine.
      mixed_nodes: whether the nodes' fingerprints may differ.
      resume: whether the directory may hold rows.
      **settings: of `interop.ray.Predictor`.

    Returns:
      All rows as `finished_rows` has them, and how many of them were there before.

    Raises:
      SettingError: the directory cannot be written or holds other rows, no cluster is there, or an
        actor failed; finished rows are kept.
    """
    check_can_write_into(directory)
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_writer_of(directory / ".rows", resume=True))
        files = sorted(directory.glob("*.parquet"))
        if others := [path.name for path in files if not path.stem.isdecimal()]:
            raise SettingError(
                f"The output {directory} has {others[0]}, which this command did not write; name "
                "another directory."
            )
        if files and not resume:
            raise SettingError(
                f"The output {directory} has rows; add --resume to continue it, or name another "
                "directory."
            )
        found = [row for path in files for row in finished_rows(path)]
        check_finished(found, rows, mixed_nodes=mixed_nodes)
        finished, num_resumed = {row["id"] for row in found}, len(found)
        todo = [dict(row) for row in rows if row["id"] not in finished]
        if not todo:
            return found, num_resumed
        size = min(BATCHES * batch_size, -(-len(todo) // num_replicas))
        blocks = [
            pyarrow.Table.from_pylist(todo[first : first + size], SCHEMA)
            for first in range(0, len(todo), size)
        ]
        stack.enter_context(connected(address))
        status = stack.enter_context(working("starting the actors"))
        predicted = predict(
            ray.data.from_arrow(blocks),
            make_engine,
            num_replicas=num_replicas,
            batch_size=size,
            mixed_nodes=mixed_nodes,
            known_fingerprint=found[0]["fingerprint"] if found else None,
            **settings,
        )
        tables = predicted.iter_batches(batch_size=None, batch_format="pyarrow")
        for number, table in enumerate(tables, int(files[-1].stem) + 1 if files else 0):
            content, path = io.BytesIO(), directory / f"{number:06d}.parquet"
            pyarrow.parquet.write_table(table, content)
            write_atomically(path, content.getvalue())
            found += finished_rows(path)
            status.update(f"decoding: {len(found)} of {len(rows)} rows done")
    return found, num_resumed


def finished_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a file: `id`, `request`, `fingerprint` and `acceptance`."""
    try:
        columns = ["id", "request", "fingerprint", *COUNTS]
        with open(path, "rb") as file:
            rows = pyarrow.parquet.read_table(file, columns=columns).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # damage has none
            raise SettingError(
                f"{path} cannot be read ({os.strerror(error.errno)}); make it readable, or name "
                "another directory."
            ) from error
        raise SettingError(
            f"{path} was not written by this command ({type(error).__name__}); name another "
            "directory."
        ) from error
    for row in rows:
        counts: dict[str, Any] = {name: row.pop(name) for name in COUNTS}
        for name, count in counts.items():
            counts[name] = tuple(count) if isinstance(count, list) else count
        row["acceptance"] = Acceptance(**counts)
    return rows


def check_finished(
    found: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], *, mixed_nodes: bool
) -> None:
    """Raises `SettingError` unless finished rows are some of this run's."""
    requests = {row["id"]: row["request"] for row in rows}
    wrong = [row["id"] for row in found if requests.get(row["id"]) != row["request"]]
    fingerprints = {row["fingerprint"] for row in found}
    reason = None
    if wrong:
        reason = f"its row {wrong[0]} has another prompt or other settings than this run's"
    elif len(fingerprints) > 1 and not mixed_nodes:
        reason = f"its rows have {len(fingerprints)} fingerprints, without --mixed-nodes"
    if reason:
        raise SettingError(
            f"The output cannot be continued: {reason}; resume with the same inputs and settings, "
            "or name another directory."
        )


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to a cluster; its errors in the block become sentences."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if (found := re.fullmatch(r"([^/]+):(\d+)", address)) is not None:
            # Ray itself would try for minutes.
            socket.create_connection((found[1], int(found[2])), timeout=10).close()
        options = {"include_dashboard": False} if address == "local" else {}
        ray.init(address, log_to_driver=False, logging_level="ERROR", **options)
    except (OSError, OverflowError, ValueError) as error:
        raise SettingError(
            f"--ray {address} was given, where no cluster answers ({str(error).splitlines()[0]}); "
            "give HOST:PORT of its head, `auto` on one of its nodes, or `local`."
        ) from error
    try:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines()
        ours = [line for line in lines if line.startswith("jaxspec.errors.")]
        said = ours[-1].partition(": ")[2] if ours else lines[-1]
        raise SettingError(
            f"An actor failed ({said.removesuffix('.')}); finished rows are kept, "
            "continue them with --resume."
        ) from error
    finally:
        ray.shutdown()
