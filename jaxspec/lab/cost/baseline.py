"""The baseline for memory plans: the policy of Medusa's and EAGLE's published code.

It is computed and never run: KV for the model's full context, the head on all positions of the
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
    """Generation memory of the policy of Medusa's and EAGLE's published code, by part.

    KV is allocated for the model's full context, the head (and every Medusa head) runs on all
    positions of the prompt, although only one is used, and the logits of a tree are copied out once
    per path. A later turn prefills the whole history again, so its prompt is the history. Prompts
    of several rows are prefilled one at a time.

    Args:
      config: the target's.
      draft: that of a draft model, whose KV and prompt logits are treated in the same way.
      itemsize: bytes of a number.
      num_rows: number of rows at a time.
      context: number of allocated slots; default the model's.
      prompt_tokens: P, the length of the longest prompt.
      num_heads: number of Medusa heads besides the model's own.
      num_nodes: number of nodes of the tree, including the root.
      num_leaves: number of paths of the tree.
      depth: depth of the tree, not counting the root.
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
