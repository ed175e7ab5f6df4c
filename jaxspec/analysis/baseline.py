"""What a memory plan is compared with: the policy that Medusa's and EAGLE's published code have.

It is reckoned and never run: KV for the model's full context, the head on all positions of the
prompt, the logits of a tree copied out once per path, and no reuse of a conversation's history.
"""

from __future__ import annotations

from jaxspec.models.config import ModelConfig


def baseline_bytes(
    config: ModelConfig,
    *,
    draft: ModelConfig | None = None,
    itemsize: int = 2,
    num_rows: int = 1,
    context: int | None = None,
    prompt_tokens: int,
    num_heads: int = 0,
    num_nodes: int,
    num_leaves: int = 1,
    depth: int,
) -> dict[str, int]:
    """Generation memory of the policy that Medusa's and EAGLE's published code have, by part.

    KV is allocated for the model's full context, the head (and every Medusa head) runs on all
    positions of the prompt, of which one is used, and the logits of a tree are copied out once per
    path. A next turn reads the whole history again, so its prompt is the history. The prompts of
    several rows are counted one at a time.

    Args:
      config: of the target.
      draft: of a draft model, whose KV and prompt logits are treated alike.
      itemsize: bytes of a number.
      num_rows: rows at a time.
      context: slots that are allocated; default the model's.
      prompt_tokens: P, of the longest prompt.
      num_heads: Medusa heads besides the model's own.
      num_nodes: of the tree, the root counted.
      num_leaves: paths of the tree.
      depth: of the tree, the root not counted.
    """
    context = config.max_length if context is None else context
    models = [config] if draft is None else [config, draft]
    per_position = (1 + num_heads) * config.vocab_size * itemsize
    found = {
        name: num_rows
        * 2
        * model.num_layers
        * model.num_kv_heads
        * model.head_size
        * itemsize
        * context
        for name, model in zip(("target_kv_bytes", "draft_kv_bytes"), models, strict=False)
    }
    of_draft = 0 if draft is None else prompt_tokens * draft.vocab_size * itemsize
    return found | {
        "prefill_logits_bytes": prompt_tokens * per_position + of_draft,
        "verify_logits_bytes": num_rows * num_nodes * per_position,
        "duplicated_logits_bytes": num_rows * num_leaves * (depth + 1) * per_position,
    }
