"""Ray: an engine in each actor of `ray.data.Dataset.map_batches`. It needs the extra `ray`.

The seed of a row is a function of its id. So with equal fingerprints no output depends on the node,
the batch, the order, a retry or the drafter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow

from jaxspec.engine.engine import Engine
from jaxspec.engine.fingerprint import fingerprint
from jaxspec.errors import PromptError, SettingError
from jaxspec.requests.requests import Request, make_requests
from jaxspec.requests.sampling_params import as_sampling_params
from jaxspec.runtime.compilation import enable_compilation_cache
from jaxspec.runtime.extras import import_extra

ray: Any = import_extra("ray", "jaxspec.interop.ray", extra="ray")
import_extra("ray.data", "jaxspec.interop.ray", extra="ray")

PROMPTS = ("prompt", "prompt_token_ids", "messages")
READ = (*PROMPTS, "params")
LOGPROBS = ("logprobs", "prompt_logprobs")


def seed_of(row_id: int | str, first: int = 0) -> int:
    """The seed of a row: `first` plus its id, or plus 48 bits of the digest of an id that is
    text."""
    if isinstance(row_id, str):
        return first + int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:6], "big")
    return first + int(row_id)


class FirstFingerprint:
    """An actor that all `Predictor`s of a job ask.

    Args:
      known: the fingerprint of rows that are finished already, or None.
    """

    def __init__(self, known: str | None = None):
        self.known = known

    def agree(self, found: str) -> str:
        """The fingerprint of the job: that of the first who asks."""
        self.known = self.known or found
        return self.known


class Predictor:
    """An engine in an actor, for `ray.data.Dataset.map_batches` with the batch format `pyarrow`;
    `predict` gives it its resources.

    A row has an `id`, a number or text; one of `prompt`, `prompt_token_ids` and `messages`; and
    perhaps `params`, fields of `SamplingParams` without `n`, whose `seed` is that of the row with
    id 0. Messages and `params` may be JSON text. Other columns are returned, together with
    `token_ids`, `text`, `finish_reason`, `logprobs` and `prompt_logprobs` (JSON text as
    `Completion.to_json` has them, null where they were not asked for), the fields of `Acceptance`
    and `fingerprint`.

    Args:
      make_engine: makes the engine, such as `functools.partial(jaxspec.Engine, "MODEL")`.
      agreement: handle of a `FirstFingerprint`; None takes any node.
      chat_template: Jinja template for messages instead of the tokenizer's own.
      chat_template_kwargs: further variables of the template.

    Raises:
      SettingError: it holds every CPU of the cluster, or another node has another fingerprint; when
        it is called, rows have a column of a result's name.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        *,
        agreement: Any = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        num_cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
        if num_cpus >= ray.cluster_resources().get("CPU", 0) > 0:
            raise SettingError(
                f"An actor was given all {num_cpus:.0f} CPUs of the cluster, and Ray's own tasks "
                "would wait for one forever; give it fewer (num_cpus)."
            )
        os.environ.setdefault("JAXSPEC_NUM_THREADS", str(max(int(num_cpus), 1)))
        enable_compilation_cache()
        self.chat = {"chat_template": chat_template, "chat_template_kwargs": chat_template_kwargs}
        self.engine = make_engine()
        more = {name: repr(value) for name, value in self.chat.items()}
        self.fingerprint = found = fingerprint(self.engine, more)
        known = found if agreement is None else ray.get(agreement.agree.remote(found))
        if known != found:
            raise SettingError(
                f"The node {os.uname().nodename} has the fingerprint {found}, and rows before it "
                f"have {known}: another processor, device, version or setting may choose another "
                "of two tied tokens; use nodes of one kind, or allow others (mixed_nodes)."
            )
        self.engine.warm_up()

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        """The rows of a batch with their completions."""
        completions = list(self.engine.run([self.request(row) for row in batch.to_pylist()]))
        ids = [one.token_ids for one in completions]
        found: dict[str, Any] = {
            "token_ids": pyarrow.array(ids, pyarrow.list_(pyarrow.int32())),
            "text": pyarrow.array([one.text for one in completions], pyarrow.string()),
            "finish_reason": [one.finish_reason for one in completions],
            "fingerprint": [self.fingerprint] * len(completions),
        }
        for field in dataclasses.fields(completions[0].acceptance):
            values = [getattr(one.acceptance, field.name) for one in completions]
            count = pyarrow.int64()
            is_list = isinstance(values[0], tuple)
            found[field.name] = pyarrow.array(values, pyarrow.list_(count) if is_list else count)
        written = [one.to_json() for one in completions]
        for name in LOGPROBS:
            values = [json.dumps(one[name]) if name in one else None for one in written]
            found[name] = pyarrow.array(values, pyarrow.string())
        given = {name: batch[name] for name in batch.column_names if name not in READ}
        if taken := sorted(given.keys() & found.keys()):
            raise SettingError(
                f"The rows have the column {taken[0]}, which is a result's name; rename it."
            )
        return pyarrow.table({**given, **found})

    def request(self, row: Mapping[str, Any]) -> Request:
        """The request of a row; raises what `make_requests` raises, and names the row."""
        name = f"The row {row['id']}"
        given = {kind: row[kind] for kind in PROMPTS if row.get(kind) is not None}
        if isinstance(given.get("messages"), str):
            given["messages"] = _parsed(given["messages"], f"{name} has messages")
        if len(given) != 1:
            held = " and ".join(given) or "no prompt"
            raise PromptError(f"{name} has {held}; give exactly one of {', '.join(PROMPTS)}.")
        params = row.get("params") or {}
        params = _parsed(params, f"{name} has params") if isinstance(params, str) else params
        if not isinstance(params, Mapping):
            raise PromptError(
                f"{name} has params of type {type(params).__name__}; give a record of fields of "
                "SamplingParams, or its JSON."
            )
        # A column of records has every field in every row, null where it was not given.
        fields = _without_nulls(params)
        if fields.get("n", 1) != 1:
            raise PromptError(
                f"{name} has n = {fields['n']}; give each completion a row with an id of its own."
            )
        fields["seed"] = seed_of(row["id"], fields.get("seed", 0))
        try:
            params = as_sampling_params(fields)
        except SettingError as error:
            raise SettingError(f"{name} has params that cannot be used: {error}") from error
        model, longest = self.engine.target, self.engine.longest_prompt
        chat = self.chat if "messages" in given else {}
        [request] = make_requests([given], [params], model, longest=longest, names=[name], **chat)
        return dataclasses.replace(request, request_id=str(row["id"]))


def _without_nulls(record: Any) -> Any:
    """A record without its fields that are null, and the same of the records in it."""
    if not isinstance(record, Mapping):
        return record
    return {name: _without_nulls(each) for name, each in record.items() if each is not None}


def _parsed(text: str, which: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise PromptError(f"{which} that are not JSON ({error}); write them as JSON.") from error


def predict(
    dataset: Any,
    make_engine: Callable[[], Engine],
    *,
    num_replicas: int,
    batch_size: int,
    mixed_nodes: bool = False,
    known_fingerprint: str | None = None,
    **settings: Any,
) -> Any:
    """A Ray dataset: the rows of another with their completions.

    Args:
      dataset: of rows as `Predictor` takes them.
      make_engine: likewise.
      num_replicas: actors; each has a GPU, or as many CPUs as leave one of the cluster to Ray.
      batch_size: rows that an actor takes at a time: several times the engine's `batch_size`.
      mixed_nodes: take nodes whose fingerprints differ.
      known_fingerprint: that of rows that are finished already; other nodes are refused.
      **settings: of `Predictor`.

    Raises:
      SettingError: the cluster has too few GPUs or CPUs.
    """
    agreement = None
    if not mixed_nodes:
        agreement = ray.remote(num_cpus=0)(FirstFingerprint).remote(known_fingerprint)
    return dataset.map_batches(
        Predictor,
        fn_constructor_args=(make_engine,),
        fn_constructor_kwargs={"agreement": agreement, **settings},
        batch_size=batch_size,
        batch_format="pyarrow",  # NumPy has no whole number that may be null
        compute=ray.data.ActorPoolStrategy(size=num_replicas),
        **resources(num_replicas),
    )


def resources(num_replicas: int) -> dict[str, int]:
    """What each of so many actors has: a GPU, or most CPUs that leave one of the cluster free."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    shares = [
        share
        for share in range(1, max(cpus) + 1)
        if sum(num // share for num in cpus) >= num_replicas and share * num_replicas < sum(cpus)
    ]
    if num_gpus < num_replicas if num_gpus else not shares:
        has = f"{num_gpus} GPUs" if num_gpus else f"{sum(cpus)} CPUs, of which Ray needs one"
        raise SettingError(
            f"{num_replicas} replicas were asked for, and the cluster has {has}; ask for fewer "
            "(num_replicas)."
        )
    return {"num_gpus": 1} if num_gpus else {"num_cpus": shares[-1]}
