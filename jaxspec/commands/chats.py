"""Questions with several turns, each in its own session."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from jaxspec.engine.engine import Engine
from jaxspec.engine.sessions import Session
from jaxspec.errors import PromptError
from jaxspec.requests.completions import Completion
from jaxspec.requests.prompts import PromptLine
from jaxspec.requests.sampling_params import SamplingParams

# Makes the prompts of some lines into token ids.
Encode: TypeAlias = Callable[[Sequence[PromptLine]], list[tuple[int, ...]]]


@dataclasses.dataclass(eq=False, kw_only=True)
class Chat:
    """A question whose turns are being answered.

    Attributes:
      line: the line, with all turns.
      number: its index among the questions.
      session: keeps its KV.
      turns: lines of the turns asked so far, each with its whole prompt.
      completions: those of the turns that have ended.
      refusal: the reason why the next turn could not be asked, or None.
    """

    line: PromptLine
    number: int
    session: Session
    turns: list[PromptLine] = dataclasses.field(default_factory=list)
    completions: list[Completion] = dataclasses.field(default_factory=list)
    refusal: PromptError | None = None

    @property
    def is_done(self) -> bool:
        """Whether every turn was answered, or the next one cannot be asked."""
        is_cut = bool(self.completions) and self.completions[-1].finish_reason == "abort"
        is_answered = len(self.completions) == self.line.num_turns
        return is_answered or is_cut or self.refusal is not None


def decode_chats(
    engine: Engine,
    lines: Sequence[PromptLine],
    params: Sequence[SamplingParams],
    encode: Encode,
    *,
    is_chat: bool,
) -> Iterator[Chat]:
    """The chats of these lines in order, each as soon as it and those before it are done. As many
    run at a time as the engine has rows.

    Args:
      engine: an idle engine.
      lines: prompts with `later_turns`.
      params: for each line, used for all of its turns.
      encode: makes prompts into token ids.
      is_chat: whether turns are messages for the chat template; otherwise lines of text.

    Raises:
      PromptError: the prompt of a first turn does not fit. A later turn that does not fit ends its
        chat.
    """
    waiting = collections.deque(
        Chat(line=line, number=number, session=engine.session())
        for number, line in enumerate(lines)
    )
    chats, running = list(waiting), dict[str, Chat]()

    def ask(chat: Chat) -> None:
        answers = [completion.text or "" for completion in chat.completions]
        turn = chat.line.turn(answers, is_chat=is_chat)
        try:
            [prompt] = encode([turn])
            name = f"{chat.number}:{len(answers)}"
            engine.submit(prompt, params[chat.number], request_id=name, session=chat.session)
        except PromptError as error:
            if not answers:
                raise
            chat.refusal = error
            return
        chat.turns.append(turn)
        running[name] = chat

    num_yielded = 0
    while num_yielded < len(chats):
        while waiting and len(running) < engine.shape.batch_size:
            ask(waiting.popleft())
        for completion in engine.step():
            chat = running.pop(completion.request_id)
            chat.completions.append(completion)
            if not chat.is_done:
                ask(chat)
            if chat.is_done:
                chat.session.close()
        while num_yielded < len(chats) and chats[num_yielded].is_done:
            yield chats[num_yielded]
            num_yielded += 1
