"""FlexDraft's weights in the layout of its authors' release.

The `config.json` is a Qwen3's with D layers; `num_target_layers` and `block_size` stand
beside its fields, and an object `dflash_config` or `flexdraft_config` states `target_layer_ids` and
`anchor_bias_rank`. Its tensors:

    layers.{i}.self_attn            q_proj, k_proj, v_proj, o_proj, q_norm, k_norm of mask rows
    mask_embedding                  what a mask row enters as
    anchor_bias_mlp.0, .2           the calibrator; its inputs are the embedding, then the state
    layers.{i}.mlp, norms           present and ignored: those of the target are used
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxspec.convert import hf_reader, hub
from jaxspec.convert.hf_config import HFConfig
from jaxspec.convert.mapping import Leaf, attention_leaves
from jaxspec.drafters.flexdraft.config import LARGEST, FlexConfig
from jaxspec.drafters.flexdraft.drafter import FlexDraft
from jaxspec.errors import ModelError
from jaxspec.models.base import LanguageModel, Model
from jaxspec.models.config import MAX_LAYERS
from jaxspec.runtime.files import is_file
from jaxspec.types import PyTree

from .tables import Layouts, place

NAMES = (
    "name a directory that jaxspec train flexdraft wrote, or one of FlexDraft's release, a hub id "
    "or demo-flexdraft"
)
_SECTIONS = ("flexdraft_config", "dflash_config")
_MLP = "anchor_bias_mlp"


def matches(directory: Path) -> bool:
    """Whether `config.json` is one of the release's."""
    path = directory / "config.json"
    if not is_file(path):
        return False
    fields = hf_reader.read_json(path)
    return any(isinstance(fields.get(section), dict) for section in _SECTIONS)


def fetch(files: Iterable[str], get: Callable[[list[str]], Path]) -> Path:
    """Fetches the weights of the release."""
    return get(["config.json", hub.weight_patterns(files)])


def read(directory: Path, target: Model, dtype: Any) -> tuple[FlexConfig, PyTree]:
    """Sizes and parameters of a directory of the release."""
    config = _release_config(hf_reader.read_config(directory), target, directory)
    tensors = hf_reader.read_tensors(hf_reader.weight_files(directory))
    leaves = _release_leaves(config)
    expected = {name: shape for leaf in leaves for name, shape in leaf.sources.items()}
    hf_reader.check_tensors(
        {name: tensor for name, tensor in tensors.items() if not _is_unused(name)},
        expected,
        where=str(directory),
        hint="they are no weights as FlexDraft's release has them",
    )
    fitting = FlexDraft.fit(config, target, str(directory))
    dtype = fitting if dtype is None else dtype
    return config, place(FlexDraft, config, leaves, tensors, dtype, target)


def _release_config(hf: HFConfig, target: Model, directory: Path) -> FlexConfig:
    """The sizes that `config.json` states, for this target.

    Raises:
      ModelError: the sizes are those of another target; the weights are not for its last layers; or
        they have no calibrator.
    """
    if not isinstance(target, LanguageModel):
        raise ModelError(
            f"The FlexDraft weights in {directory} run layers of their target one by one, as only "
            f"a jaxspec.LanguageModel has them, and {target.name} is another kind of model."
        )
    sections = [name for name in _SECTIONS if isinstance(hf.get(name), dict)]
    if not sections:
        raise ModelError(f"{directory} holds no weights of FlexDraft; {NAMES}.")
    own = hf.section(sections[0])
    config = target.config
    num_deep = hf.count("num_hidden_layers", most=MAX_LAYERS)
    stated = {
        "num_layers": (hf.count("num_target_layers", config.num_layers), config.num_layers),
        "width": (hf.get("hidden_size"), config.width),
        "vocab_size": (hf.get("vocab_size"), config.vocab_size),
        "num_query_heads": (hf.get("num_attention_heads"), config.num_query_heads),
        "num_kv_heads": (hf.get("num_key_value_heads"), config.num_kv_heads),
    }
    for what, (theirs, ours) in stated.items():
        if theirs != ours:
            raise ModelError(
                f"The FlexDraft weights in {directory} were made for a target with {what} "
                f"{theirs}, and {target.name} has {what} {ours}; use weights that were made for "
                "this target."
            )
    last = list(range(config.num_layers - num_deep, config.num_layers))
    if own.get("target_layer_ids") not in (None, last):
        raise ModelError(
            f"The FlexDraft weights in {directory} belong to the layers "
            f"{own.get('target_layer_ids')} of their target; only the last ones, here {last}, can "
            "have draft projectors."
        )
    if own.get("enable_anchor_bias_logits") is not True:
        raise ModelError(
            f"The FlexDraft weights in {directory} have no calibrator "
            "(enable_anchor_bias_logits); use weights that have one."
        )
    return FlexConfig(
        target=config,
        num_deep_layers=num_deep,
        block_size=hf.count("block_size", most=LARGEST),
        rank=own.count("anchor_bias_rank", 256, most=LARGEST),
    )


def _release_leaves(config: FlexConfig) -> list[Leaf]:
    """The table of the release's tensors."""
    width, rank, vocab_size = config.target.width, config.rank, config.target.vocab_size
    leaves = []
    for index in range(config.num_deep_layers):
        for leaf in attention_leaves(config.target, index):
            sources = {name.removeprefix("model."): shape for name, shape in leaf.sources.items()}
            leaves.append(Leaf(leaf.path, sources, leaf.pieces))
    both = {f"{_MLP}.0.weight": (rank, 2 * width)}
    last = {f"{_MLP}.2.weight": (vocab_size, rank)}
    return [
        *leaves,
        Leaf(("mask",), {"mask_embedding": (width,)}),
        Leaf(("calibrator", "embedding"), both, lambda w: [(..., w[:, :width].T)]),
        Leaf(("calibrator", "hidden"), both, lambda w: [(..., w[:, width:].T)]),
        Leaf(("calibrator", "hidden_bias"), {f"{_MLP}.0.bias": (rank,)}),
        Leaf(("calibrator", "logits"), last, lambda w: [(..., w.T)]),
        Leaf(("calibrator", "logits_bias"), {f"{_MLP}.2.bias": (vocab_size,)}),
    ]


def _is_unused(name: str) -> bool:
    """Whether decoding does not use this tensor of the release: those of a layer outside its
    attention, and the final norm."""
    is_of_layer = name.startswith("layers.") and ".self_attn." not in name
    return is_of_layer or name == "norm.weight"


LAYOUTS = Layouts(matches, fetch, read, NAMES)
