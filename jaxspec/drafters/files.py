"""Saved drafters with weights of their own: heads, and FlexDraft."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jaxspec.checkpoint.format import is_converted, parse_dtype
from jaxspec.checkpoint.manifest import kind_of
from jaxspec.checkpoint.resolve import as_model
from jaxspec.convert import hf_reader, hub
from jaxspec.drafters.flexdraft.drafter import FlexDraft, Mode, Rule
from jaxspec.drafters.flexdraft.files import (
    KIND,
    export_release,
    fetch_release,
    is_release,
    load_flexdraft,
    save_flexdraft,
)
from jaxspec.drafters.growth import Tree
from jaxspec.drafters.heads import config as heads_config
from jaxspec.drafters.heads.drafter import Heads
from jaxspec.drafters.heads.files import MakeTree, load_heads, save_heads
from jaxspec.drafters.heads.layouts.medusa import FILES as MEDUSA_FILES
from jaxspec.drafters.heads.other_layouts import NAMES_OF_HEADS, export_heads, fetch_heads
from jaxspec.drafters.heads.tree_names import parse_tree
from jaxspec.errors import ModelError, SettingError
from jaxspec.models.base import LanguageModel, Model
from jaxspec.runtime.compilation import check_not_forked
from jaxspec.runtime.directories import finish_interrupted
from jaxspec.runtime.files import expand_user, is_file, is_there, reading
from jaxspec.runtime.values import text

Kind: TypeAlias = heads_config.Kind | Literal["flexdraft"]

# Drafters that come with the package, for `demo-target`, and their directories in it.
DEMO_DRAFTERS = {"demo-flexdraft": "flexdraft"}


def save_drafter(
    drafter: Heads | FlexDraft,
    directory: str | os.PathLike,
    *,
    target: LanguageModel | None = None,
    overwrite: bool = False,
) -> None:
    """Writes heads or FlexDraft's weights to a directory, from which `load_drafter` reads them bit
    for bit.

    Args:
      drafter: heads or FlexDraft. Settings (the tree of heads; mode, confidence, rule and block
        size of FlexDraft) are not stored.
      directory: to write.
      target: the model that it was made for. Its name and a digest of its weights are stored, so
        that `load_drafter` notices other weights.
      overwrite: replace the directory if it holds a drafter of the same kind.

    Raises:
      CheckpointError: the directory exists and may not be replaced, or the disk is full.
      SettingError: this process was forked from one that had used JAX.
    """
    check_not_forked()
    if isinstance(drafter, FlexDraft):
        save_flexdraft(drafter, directory, target=target, overwrite=overwrite)
    else:
        save_heads(drafter, directory, target=target, overwrite=overwrite)


def load_drafter(
    name: str | os.PathLike,
    target: Model | str,
    *,
    dtype: Any = None,
    kind: Kind | None = None,
    tree: Tree | str | None = None,
    mode: Mode | None = None,
    confidence: float | None = None,
    rule: Rule | None = None,
    block_size: int | None = None,
    revision: str | None = None,
    verify: bool = True,
) -> Heads | FlexDraft:
    """Loads heads that read the hidden states of `target`, or FlexDraft's weights for it.

    `name` is a directory that `save_drafter` (or `jaxspec train`) wrote, or a directory or hub id
    in one of these layouts: Medusa's `medusa_lm_head.safetensors` or `.pt` (which needs torch),
    `medusa_head.*` among the tensors of a merged model, vLLM's Medusa, Clover-2's release,
    FlexDraft's release; or `demo-flexdraft`, FlexDraft for `demo-target`. From the hub only the
    files that hold the drafter are fetched. Heads that contain a copy of the target's head share
    the target's instead; if their vocabulary was truncated, they then propose tokens of the whole
    vocabulary.

    Args:
      name: the drafter's.
      target: the model that it drafts for, or a name for `load_model`.
      dtype: that of the parameters; None is the target's.
      kind: the required kind of drafter: `medusa`, `hydra`, `clover`, `clover2` or `flexdraft`;
        None accepts any.
      tree: the tree that heads draft, or its name: `chain`, a number of nodes,
        `WIDTHxDEPTH:NODES` or one of Medusa's, see `parse_tree`; None is Clover's of four nodes.
      mode: for FlexDraft only; this and the next three are arguments of `FlexDraft`, or None.
      confidence: see `FlexDraft`.
      rule: see `FlexDraft`.
      block_size: see `FlexDraft`.
      revision: branch, tag or commit of a hub id.
      verify: compare the files of our directories with their checksums.

    Raises:
      SettingError: a setting is out of range, or belongs to another kind of drafter; or this
        process was forked from one that had used JAX.
      ModelError: there is no such drafter, it is of another kind, or it does not fit the target.
      CheckpointError: it cannot be read; `DamagedError` if its files have changed,
        `UnreadableError` if the system does not let this process read them.

    Warns:
      JaxspecWarning: it was made for a target with other weights.
    """
    check_not_forked()
    make_tree = parse_tree(tree) if isinstance(tree, str) else lambda num_heads: tree
    target = as_model(target)
    name = os.fspath(name) if isinstance(name, os.PathLike) else text("name", name)
    dtype = None if dtype is None else parse_dtype(dtype)
    given = {"mode": mode, "confidence": confidence, "rule": rule, "block_size": block_size}
    settings: dict[str, Any] = {each: value for each, value in given.items() if value is not None}
    with reading(name), _found(name, revision) as directory:
        return _load(
            directory,
            target,
            name=name,
            dtype=dtype,
            kind=kind,
            make_tree=None if tree is None else make_tree,
            settings=settings,
            verify=verify,
        )


def _load(
    directory: Path,
    target: Model,
    *,
    name: str,
    dtype: Any,
    kind: Kind | None,
    make_tree: MakeTree | None,
    settings: dict[str, Any],
    verify: bool,
) -> Heads | FlexDraft:
    """`load_drafter` for a directory; `settings` are the given settings of FlexDraft."""
    if _holds_flexdraft(directory, kind):
        if kind not in (None, KIND):
            raise ModelError(
                f"{directory} holds FlexDraft's weights, and {kind} was asked for; write "
                f"{KIND}:{directory}."
            )
        if make_tree is not None:
            raise SettingError(
                f"A tree was given for FlexDraft's weights in {directory}, which draft a chain; "
                "leave it out."
            )
        return load_flexdraft(directory, target, name=name, dtype=dtype, verify=verify, **settings)
    if settings:
        raise SettingError(
            f"{' and '.join(settings)} was given for the heads in {directory}; it is a setting of "
            "FlexDraft, so leave it out."
        )
    wanted: Any = kind
    return load_heads(
        directory,
        target,
        name=name,
        dtype=dtype,
        make_tree=make_tree or (lambda num_heads: None),
        kind=wanted,
        verify=verify,
    )


def export_drafter(
    drafter: Heads | FlexDraft,
    directory: str | os.PathLike,
    format: str,
    *,
    target: LanguageModel,
    overwrite: bool = False,
) -> None:
    """Writes a drafter in another project's layout: `config.json` and `model.safetensors`.

    Args:
      drafter: heads or FlexDraft.
      directory: to write.
      format: `vllm` for Medusa's heads, `clover2` for Clover-2's and `flexdraft` for FlexDraft's
        weights as their releases have them.
      target: the model that they draft for, a copy of whose head is part of the layouts of heads.
      overwrite: replace the directory if it holds a drafter in one of these layouts.

    Raises:
      ModelError: there is no such format, or it cannot hold this drafter.
      CheckpointError: the directory exists and may not be replaced, or the disk is full.
      SettingError: this process was forked from one that had used JAX.

    Warns:
      JaxspecWarning: Clover-2's release does not compute these heads as they were trained.
    """
    check_not_forked()
    if isinstance(drafter, Heads):
        export_heads(drafter, directory, format, target=target, overwrite=overwrite)
    elif format == KIND:
        export_release(drafter, directory, target=target, overwrite=overwrite)
    else:
        raise ModelError(
            f"FlexDraft's weights were to be written as {format!r}; there is {KIND}, and "
            "save_drafter."
        )


@contextlib.contextmanager
def _found(name: str, revision: str | None) -> Iterator[Path]:
    """The directory of a name, fetched from the hub if it is a hub id."""
    if name in DEMO_DRAFTERS:
        assets = importlib.resources.files("jaxspec") / "assets" / DEMO_DRAFTERS[name]
        with importlib.resources.as_file(assets) as directory:
            yield directory
        return
    directory = expand_user(name)
    finish_interrupted(directory)
    if not is_there(directory):
        _, directory = hub.download(
            name, revision, choose=_fetch_drafter, what="directory of heads", names=NAMES_OF_HEADS
        )
    elif revision is not None:
        raise ModelError(
            f"A revision ({revision}) was given for the local directory {name}; "
            "revisions are for hub ids, so leave it out."
        )
    yield directory


def _fetch_drafter(files: Iterable[str], fetch: Callable[[list[str]], Path]) -> Path:
    """Fetches the files of a drafter; `config.json` says whether it is FlexDraft."""
    files = set(files)
    has_own_file = not files.isdisjoint(MEDUSA_FILES)
    if has_own_file or "config.json" not in files or not _is_release(fetch(["config.json"])):
        return fetch_heads(files, fetch)
    return fetch_release(files, fetch)


def _is_release(directory: Path) -> bool:
    path = directory / "config.json"
    return is_file(path) and is_release(hf_reader.read_json(path))


def _holds_flexdraft(directory: Path, kind: Kind | None) -> bool:
    """Whether to read a directory as FlexDraft's: by its own manifest, or if it has none, by the
    requested kind."""
    if is_converted(directory):
        found = kind_of(directory)
        return found == KIND or (found is None and kind == KIND)
    return _is_release(directory) or kind == KIND
