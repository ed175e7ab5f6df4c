"""What an engine keeps of a conversation between two turns."""

from __future__ import annotations

import dataclasses

from jaxspec.decode.kept import StoredRow


@dataclasses.dataclass(eq=False)
class Conversation:
    """Tokens whose KV is kept, and where it is: in a row of the batch, on the host, or nowhere.

    Attributes:
      is_reread: whether KV that rounds wrote is prefilled again, in chunks that begin where they
        would without a session.
      token_ids: those of the last turn, prompt and output; some tokens may follow a stop string.
      num_slots: number of first tokens whose KV is kept.
      num_prefilled: how many of these have KV that was written by prefill chunks which begin at
        multiples of the chunk size.
      row: the row of the batch that holds the KV, or None.
      stored: the KV on the host, or None.
      last_used: a counter over all conversations that grows with every use.
      is_closed: whether nothing is kept after the turn in progress.
    """

    is_reread: bool = False
    token_ids: tuple[int, ...] = ()
    num_slots: int = 0
    num_prefilled: int = 0
    row: int | None = None
    stored: StoredRow | None = None
    last_used: int = 0
    is_closed: bool = False

    @property
    def num_held(self) -> int:
        """How many tokens of the last turn the next one would have to prefill without a session."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def has_kv(self) -> bool:
        """Whether any KV is kept."""
        return self.row is not None or self.stored is not None

    def num_common(self, prompt: tuple[int, ...], *, is_reread: bool) -> int:
        """How many first tokens of the prompt have KV that is kept (with `is_reread`, only KV
        written by prefill chunks); never all tokens, because the first round scores the last
        one."""
        if not self.has_kv:
            return 0
        limit = min(self.num_prefilled if is_reread else self.num_slots, len(prompt) - 1)
        for index in range(limit):
            if prompt[index] != self.token_ids[index]:
                return index
        return limit
