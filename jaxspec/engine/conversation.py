"""What an engine remembers of a conversation between two of its turns."""

from __future__ import annotations

import dataclasses

from jaxspec.decode.kept import StoredRow


@dataclasses.dataclass(eq=False)
class Conversation:
    """Tokens whose KV is kept, and where it is: in a row of the batch, on the host, or nowhere.

    Attributes:
      is_reread: KV that rounds wrote is read again, in chunks that begin where they would begin
        without a session.
      token_ids: of the last turn, prompt and output; some tokens may follow a stop string.
      num_slots: tokens whose KV there is, from the first on.
      num_prefilled: of these, the ones whose KV was written by chunks of a prompt that begin at
        multiples of the chunk.
      row: of the batch, that holds the KV.
      stored: the KV on the host.
      last_used: a number that grows with every use, of all conversations.
      is_closed: nothing is kept after the turn in progress.
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
        """Tokens of the last turn that a next one would have to read without a session."""
        return max(len(self.token_ids) - 1, 0)

    @property
    def has_kv(self) -> bool:
        """Whether any KV is kept."""
        return self.row is not None or self.stored is not None

    def num_common(self, prompt: tuple[int, ...], *, is_reread: bool) -> int:
        """Tokens of the prompt, from the first on, whose KV is kept, with `is_reread` by chunks of
        a prompt; less than all of them: the first round scores the last one."""
        if not self.has_kv:
            return 0
        limit = min(self.num_prefilled if is_reread else self.num_slots, len(prompt) - 1)
        for index in range(limit):
            if prompt[index] != self.token_ids[index]:
                return index
        return limit
