"""What names a drafter, as `Engine(drafter=...)` and `--drafter` take it; and the directories of
drafters with weights of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.resources
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from jaxspec.checkpoint.format import (
    at_path,
    is_converted,
    leaf_paths,
    parse_dtype,
    read_params,
    weights_digest,
    write_params,
)
from jaxspec.checkpoint.manifest import (
    DTYPES,
    DrafterManifest,
    check_stored,
    checksums,
    kind_of,
    read_record,
    typed,
    verified,
    write_record,
)
from jaxspec.convert import hub
from jaxspec.drafters.base import Drafter, TrainedDrafter
from jaxspec.drafters.draft_model import NUM_SINKS, DraftModel, check_settings
from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.tree_names import named_tree
from jaxspec.drafters.trees import Tree
from jaxspec.errors import JaxspecError, ModelError, SettingError
from jaxspec.kernels.base import unpacked
from jaxspec.load.layouts import flexdraft, heads
from jaxspec.load.layouts.tables import Layouts, sharding_of, warn_of_other_weights
from jaxspec.load.models import PACKAGED_MODELS, as_model, load_packed
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.shapes import ShapeModel
from jaxspec.runtime.compilation import check_not_forked
from jaxspec.runtime.directories import atomic_directory, check_free_space, finish_interrupted
from jaxspec.runtime.files import expand_user, is_there, reading
from jaxspec.runtime.values import check_kind, refusal, text
from jaxspec.types import PyTree

MakeDrafter: TypeAlias = Callable[[Model], Drafter]

# Drafters that come with the package: their kinds, and their directories in it.
PACKAGED_DRAFTERS = {
    "demo-flexdraft": ("flexdraft", "flexdraft"),  # for `demo-target`
    "smollm2-clover": ("heads", "smollm2-clover"),  # for SmolLM2-135M-Instruct in Q4_1
}
NGRAM_FIRST = "ngram+"  # before the name of heads or of a draft model: those with an `NGram`
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


# The registry


@dataclasses.dataclass(frozen=True)
class DrafterKind:
    """A row of the registry.

    Attributes:
      name: in `Engine(drafter={"kind": name, ...})` and `--drafter name`.
      load: checks its keyword arguments, and returns a function that makes the drafter for a
        target.
      arguments: the names of these arguments.
      matches: whether a directory holds weights of this kind, so that the kind need not be named.
    """

    name: str
    load: Callable[..., MakeDrafter]
    arguments: tuple[str, ...]
    matches: Callable[[Path], bool] = lambda directory: False


def trained(drafter: type[TrainedDrafter], layouts: Layouts | None = None) -> DrafterKind:
    """The row of a drafter with weights of its own, named `drafter.kind`. Its arguments are
    `model`, those of `load_model`, and the settings of the class."""
    _, _, *others = inspect.signature(drafter).parameters  # after config and params
    made: Any = drafter

    def load(
        *,
        model: str,
        dtype: Any = None,
        revision: str | None = None,
        verify: bool = True,
        **settings: Any,
    ) -> MakeDrafter:
        drafter.check_settings(**settings)
        dtype = None if dtype is None else parse_dtype(dtype)

        def make(target: Model) -> Drafter:
            check_not_forked()
            name = os.fspath(model) if isinstance(model, os.PathLike) else text("model", model)
            with reading(name), _found(name, revision, drafter.kind, layouts) as directory:
                if is_converted(directory) or layouts is None:
                    config, params = _read(drafter, directory, target, dtype, verify=verify)
                else:
                    config, params = layouts.read(directory, target, dtype)
                return made(config, params, name=name, **settings)

        return make

    def matches(directory: Path) -> bool:
        if is_converted(directory):
            return kind_of(directory) == drafter.kind
        return layouts is not None and layouts.matches(directory)

    settings = (name for name in others if name != "name")
    arguments = ("model", *settings, "dtype", "revision", "verify")
    return DrafterKind(drafter.kind, load, arguments, matches)


def _load_ngram(**settings: Any) -> MakeDrafter:
    ngram = NGram(**settings)
    return lambda target: ngram


def _load_draft_model(
    *,
    model: str | os.PathLike,
    tree: Tree | str | int | None = None,
    min_confidence: float = 0.0,
    kv_window: int | None = None,
    kv_sinks: int = NUM_SINKS,
    prompt_lookup_min: int | None = None,
    prompt_lookup_max: int | None = None,
    **of_model: Any,
) -> MakeDrafter:
    tree = named_tree(tree) if isinstance(tree, str | int) else tree
    settings = min_confidence, tree, kv_window, kv_sinks
    check_settings(*settings, prompt_lookup_min, prompt_lookup_max)
    return lambda target: DraftModel(
        load_packed(model, **of_model),
        *settings,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
    )


_OF_WINDOW = ("kv_window", "kv_sinks")
_OF_LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
_OF_MODEL = ("kv_dtype", "dtype", "revision", "verify")  # of `load_model`

# To add a kind, add a row.
KINDS = {
    kind.name: kind
    for kind in (
        DrafterKind("ngram", _load_ngram, tuple(inspect.signature(NGram).parameters)),
        DrafterKind(
            "draft_model",
            _load_draft_model,
            ("model", "tree", "min_confidence", *_OF_WINDOW, *_OF_LOOKUP, *_OF_MODEL),
        ),
        trained(Heads, heads.LAYOUTS),
        trained(FlexDraft, flexdraft.LAYOUTS),
    )
}


# Names


class NamedDrafter(NamedTuple):
    """What names a drafter, taken apart.

    Attributes:
      kind: the name of a row of `KINDS`, or `package.module:factory`.
      arguments: of the row's `load`, or of the factory.
    """

    kind: str
    arguments: dict[str, Any]


def parse_drafter(
    drafter: str | Mapping[str, Any], arguments: Mapping[str, Any] | None = None
) -> NamedDrafter:
    """Takes apart what names a drafter; see `load_drafter`. `arguments` are added to its own.

    Raises:
      SettingError: it names none, or its arguments are not those of its kind.
    """
    has_ngram = isinstance(drafter, str) and drafter.startswith(NGRAM_FIRST)
    if isinstance(drafter, str):
        given = _parse_name(drafter.removeprefix(NGRAM_FIRST))
    else:
        given = dict(drafter)
    given |= arguments or {}
    if has_ngram:
        given.setdefault("prompt_lookup_min", 2)
    if "kind" not in given and "model" not in given:
        raise SettingError(
            f"The drafter {drafter!r} was given without a kind; add one of {', '.join(KINDS)}, as "
            "in {'kind': 'ngram'}."
        )
    if not isinstance(given.get("model", ""), str | os.PathLike):
        raise refusal("model", given["model"], "a name or a path")
    named = given.pop("kind", None)
    kind = _kind_of_weights(given["model"]) if named is None else text("kind", named)
    if has_ngram and kind not in (Heads.kind, "draft_model"):
        raise SettingError(
            f"The drafter {drafter!r} was given, and only heads and draft models can follow "
            f"{NGRAM_FIRST}; name one of these, or leave {NGRAM_FIRST} out."
        )
    if kind in KINDS:
        known = KINDS[kind].arguments
        for name in given:
            if name not in known:
                raise SettingError(
                    f"{name} was given for the drafter {kind}, which takes {', '.join(known)}; "
                    "leave it out."
                )
        if "model" in known and not given.get("model"):
            raise SettingError(
                f"The drafter {kind} was given without a model; write {kind}:MODEL, or "
                f"{{'kind': {kind!r}, 'model': ...}}."
            )
    elif not _FACTORY.fullmatch(kind):
        raise _no_drafter(kind)
    return NamedDrafter(kind, given)


def _parse_name(name: str) -> dict[str, Any]:
    """The fields of a name that is a string."""
    if name.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            return dict(json.loads(name))
        raise SettingError(f"The drafter {name!r} was given; write a JSON object or a name.")
    kind, colon, model = name.partition(":")
    if colon and kind in KINDS:
        return {"kind": kind, "model": model}
    if kind in KINDS:
        is_directory = "model" in KINDS[kind].arguments and os.path.isdir(kind)
        return {"model": kind} if is_directory else {"kind": kind}
    leading = re.match(r"\w*", name)
    if leading is not None and leading[0] in KINDS:
        raise _no_drafter(name)
    return {"model": name} if _is_model(name) else {"kind": name}


def _no_drafter(name: str) -> SettingError:
    return SettingError(
        f"There is no drafter {name!r}; choose none, {', '.join(KINDS)}, KIND:MODEL, a model or a "
        "directory of a drafter, or name your own as package.module:factory, and give settings as "
        "--drafter-args JSON, in Python as {'kind': ..., ...}."
    )


def _is_model(name: str) -> bool:
    """Whether a name is that of weights. A hub id without a slash looks like a misspelt kind, so it
    is written `draft_model:ID`."""
    is_path = "/" in name or (name != "" and os.path.isdir(expand_user(name)))
    is_path |= name.endswith(".gguf")
    is_packaged = name in PACKAGED_MODELS or name in PACKAGED_DRAFTERS
    return is_packaged or name.startswith("random:") or is_path


def _kind_of_weights(name: str | os.PathLike) -> str:
    """The kind of drafter that a directory holds; what is on the hub is a draft model."""
    if name in PACKAGED_DRAFTERS:
        return PACKAGED_DRAFTERS[str(name)][0]
    directory = expand_user(os.fspath(name))
    with reading(directory):
        finish_interrupted(directory)
        if name and is_there(directory):
            for kind in KINDS.values():
                if kind.matches(directory):
                    return kind.name
    return "draft_model"


def choose_drafter(
    drafter: str | Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    dtype: Any = None,
    verify: bool = True,
) -> MakeDrafter | None:
    """A function that makes the named drafter for a target; None for `none`, plain decoding.

    Names and settings are checked now; weights are loaded when the drafter is made.

    Args:
      drafter: see `load_drafter`.
      arguments: added to those that it names.
      dtype: of a draft model, unless it is given with the name.
      verify: whether its files are compared with their checksums, likewise.

    Raises:
      SettingError: see `parse_drafter`, or a setting is out of range.
      ModelError: the factory cannot be imported or, when it is called, does not return a drafter.
    """
    check_kind("drafter", drafter, (str, Mapping), "a drafter, what names one, or None")
    alone = drafter if isinstance(drafter, str) else len(drafter) == 1 and drafter.get("kind")
    if isinstance(alone, str) and alone == "none":
        return None
    kind, given = parse_drafter(drafter, arguments)
    if kind not in KINDS:
        return _of_factory(kind, given)
    defaults = {"dtype": dtype, "verify": verify}
    known = KINDS[kind].arguments
    return KINDS[kind].load(
        **{name: value for name, value in defaults.items() if name in known} | given
    )


def make_drafter(
    drafter: Drafter | str | Mapping[str, Any] | None, target: Model, *, dtype: Any = None
) -> Drafter | None:
    """A drafter for `target`: what names one is resolved by `choose_drafter`; a drafter, or None,
    is returned as it is.

    Raises:
      SettingError: it is none of these, or what `choose_drafter` raises.
      ModelError: as `choose_drafter` raises it.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    make = choose_drafter(drafter, dtype=dtype)
    return None if make is None else make(target)


def load_drafter(
    name: str | os.PathLike | Mapping[str, Any],
    target: Model | str,
    *,
    kind: str | None = None,
    **arguments: Any,
) -> Drafter:
    """Loads a drafter for `target` by its name.

    `name` is one of these, tried in this order: a kind, such as `ngram`; `KIND:MODEL`, as in
    `draft_model:demo-draft`; a directory of a drafter, or a model for `load_model`, which makes a
    `DraftModel`; `package.module:factory`, a function of the target or of nothing. `ngram+` before
    the name of heads or of a draft model stands for a `prompt_lookup_min` of 2. Settings are
    keyword arguments here; elsewhere they stand in a mapping or JSON object, such as `{"kind":
    "heads", "model": "DIRECTORY", "tree": "4x4:16"}`. Where there is a model, the kind may be left
    out: a directory says what it holds, and what is on the hub is a draft model.

    Weights of a drafter are a directory that `save_drafter` or `jaxspec train` wrote, or a
    directory or hub id in one of these layouts: Medusa's `medusa_lm_head.safetensors` or `.pt`
    (which needs torch), `medusa_head.*` among the tensors of a merged model, vLLM's Medusa,
    Clover-2's release, FlexDraft's release. These come with the package: `demo-flexdraft`,
    FlexDraft for `demo-target`; `smollm2-clover`, Clover's heads for SmolLM2-135M-Instruct; and the
    draft models `demo-draft` and `smollm2-draft`. From the hub only the files that hold the drafter
    are fetched. Heads that contain a copy of the target's head share the target's instead; if their
    vocabulary was truncated, they then propose tokens of the whole vocabulary.

    Args:
      name: what names the drafter, or its weights if a kind is given.
      target: the model that it drafts for, or a name for `load_model`.
      kind: a row of `KINDS`, or None.
      arguments: of the kind: the settings of `NGram`, `DraftModel`, `Heads` or `FlexDraft`, where a
        tree may be named (see `named_tree`); and where there are weights `dtype` (None is the
        target's for drafters, the checkpoint's own for draft models), `revision` (branch, tag or
        commit of a hub id) and `verify` (compare files with their checksums). Those of a factory
        are its own.

    Raises:
      SettingError: a setting is unknown or out of range; or this process was forked from one that
        had used JAX.
      ModelError: there is no such drafter, it is of another kind, or it does not fit the target.
      CheckpointError: it cannot be read; `DamagedError` if its files have changed,
        `UnreadableError` if the system does not let this process read them.

    Warns:
      JaxspecWarning: it was made for a target with other weights.
    """
    check_not_forked()
    if isinstance(name, os.PathLike):
        named: Any = {"model": os.fspath(name)}
    else:
        named = name if isinstance(name, Mapping) else text("name", name)
    if kind is not None:
        named = {"kind": kind, "model": name}
    make = choose_drafter(named, arguments)
    if make is None:
        raise SettingError(
            "The drafter none was to be loaded, which is plain decoding; give an engine "
            "drafter=None."
        )
    return make(as_model(target))


def _of_factory(name: str, arguments: Mapping[str, Any]) -> MakeDrafter:
    module_name, _, factory_name = name.partition(":")
    try:
        factory: Any = importlib.import_module(module_name)
        for part in factory_name.split("."):
            factory = getattr(factory, part)
        needed = _required_arguments(factory, arguments)
    except Exception as error:  # whatever the user's module raises
        raise ModelError(
            f"The drafter {name} cannot be imported ({type(error).__name__}: {error}); check the "
            "name, and that the module is installed or in the current directory."
        ) from error
    if needed > 1:
        raise ModelError(
            f"The drafter {name} needs {needed} arguments besides those that were given; name a "
            "function of the target, or of nothing."
        )

    def make(target: Model) -> Drafter:
        try:
            drafter = factory(target, **arguments) if needed else factory(**arguments)
        except JaxspecError:
            raise
        except Exception as error:  # whatever the user's function raises
            raise ModelError(
                f"The drafter {name} cannot be made ({type(error).__name__}: {error}); check that "
                "it takes the target, or nothing, and the arguments that were given."
            ) from error
        if not isinstance(drafter, Drafter):
            raise ModelError(
                f"{name} returned a {type(drafter).__name__}; return a drafter, whose class is a "
                "subclass of jaxspec.Drafter."
            )
        return drafter

    return make


def _required_arguments(factory: Any, given: Mapping[str, Any]) -> int:
    return sum(
        parameter.default is parameter.empty
        and parameter.name not in given
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(factory).parameters.values()
    )


# Directories of drafters with weights of their own


def save_drafter(
    drafter: TrainedDrafter,
    directory: str | os.PathLike,
    *,
    target: LanguageModel | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a drafter with weights of its own to a directory, complete or not at all, from which
    `load_drafter` reads them bit for bit.

    Args:
      drafter: such as heads or FlexDraft. Settings (the tree of heads; mode, confidence, rule and
        block size of FlexDraft) are not stored.
      directory: to write.
      target: the model that it was made for. Its name and a digest of its weights are stored, so
        that `load_drafter` notices other weights.
      overwrite: replace the directory if it holds a drafter of the same kind.

    Raises:
      CheckpointError: the directory exists and may not be replaced, or the disk is full.
      SettingError: it has no weights of its own; or this process was forked from one that had used
        JAX.
    """
    check_not_forked()
    check_kind("drafter", drafter, TrainedDrafter, "a drafter with weights of its own")
    params, shapes = unpacked(drafter.params), drafter.param_shapes(drafter.config)
    leaves = [(path, at_path(params, path)) for path, _ in leaf_paths(shapes)]
    dtype = next(leaf.dtype for _, leaf in leaves if leaf.dtype.name in DTYPES)
    num_bytes = sum(leaf.nbytes for _, leaf in leaves)
    check_free_space(Path(directory).absolute().parent, num_bytes, what=f"Saving {drafter.name}")

    def may_replace(found: Path) -> bool:
        return kind_of(found) == drafter.kind

    with atomic_directory(directory, overwrite=overwrite, may_replace=may_replace) as partial:
        write_params(partial, leaves)
        manifest = DrafterManifest(
            kind=drafter.kind,
            config=dataclasses.asdict(drafter.config),
            dtype=dtype.name,
            target=None if target is None else target.name,
            target_weights=None if target is None else weights_digest(target.params),
            num_params=_num_params(shapes),
            files=checksums(partial),
        )
        write_record(partial, manifest)


def _num_params(shapes: Any) -> int:
    return sum(math.prod(shape) for _, shape in leaf_paths(shapes))


def _read(
    drafter: type[TrainedDrafter], directory: Path, target: Model, dtype: Any, *, verify: bool
) -> tuple[Any, PyTree]:
    """The configuration and parameters in a directory that `save_drafter` wrote, placed like the
    target's."""

    def config_of(manifest: DrafterManifest) -> Any:
        return typed(manifest.config, drafter.config_type, "config")

    def check(manifest: DrafterManifest) -> None:
        check_stored(manifest, _num_params(drafter.param_shapes(config_of(manifest))))

    kind = drafter.kind
    manifest = read_record(directory, DrafterManifest, check, kind=kind, verify=verify)
    config = config_of(manifest)
    fitting = drafter.fit(config, target, str(directory))
    dtype, sharding = fitting if dtype is None else dtype, sharding_of(target)
    shapes = drafter.param_shapes(config)
    wanted = {
        path: jax.ShapeDtypeStruct(
            shape, np.dtype(drafter.param_dtype(path, dtype)), sharding=sharding
        )
        for path, shape in leaf_paths(shapes)
    }
    with verified(directory, manifest, verify=verify):
        params = read_params(directory, shapes, wanted, kind=kind)
    has_values = isinstance(target, LanguageModel) and not isinstance(target, ShapeModel)
    if manifest.target_weights is not None and has_values:
        if manifest.target_weights != weights_digest(target.params):
            warn_of_other_weights(directory, manifest.target or "a model", target)
    return config, params


@contextlib.contextmanager
def _found(name: str, revision: str | None, kind: str, layouts: Layouts | None) -> Iterator[Path]:
    """The directory of a name, fetched from the hub if it is a hub id."""
    if name in PACKAGED_DRAFTERS:
        assets = importlib.resources.files("jaxspec") / "assets" / PACKAGED_DRAFTERS[name][1]
        with importlib.resources.as_file(assets) as directory:
            yield directory
        return
    directory = expand_user(name)
    finish_interrupted(directory)
    if not is_there(directory):
        if layouts is None:
            raise ModelError(
                f"There is no directory {name} with a drafter of kind {kind}; name one that "
                "save_drafter wrote."
            )
        _, directory = hub.download(
            name,
            revision,
            choose=layouts.fetch,
            what=f"drafter of kind {kind}",
            names=layouts.names,
        )
    elif revision is not None:
        raise ModelError(
            f"A revision ({revision}) was given for the local directory {name}; "
            "revisions are for hub ids, so leave it out."
        )
    yield directory
