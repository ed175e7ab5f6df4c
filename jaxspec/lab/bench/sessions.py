"""Time to the first token of a chat's second turn, with and without a session.

Three cases are compared, in alternation, on one engine: the whole history as a new prompt; a
session whose KV is still in its row; and a session whose row another request has taken, so that its
KV comes back from the host. All of them emit the same token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from jaxspec.drafters.draft_model import DraftModel
from jaxspec.engine.engine import Engine
from jaxspec.engine.sessions import Session
from jaxspec.errors import SettingError
from jaxspec.lab.bench.measure import PairBench, random_prompts
from jaxspec.requests.completions import Completion
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runtime.report import Columns
from jaxspec.runtime.turns import take_turns

Prompt: TypeAlias = list[int]

WITHOUT, IN_ROW, ON_HOST = "no session", "session in its row", "session on the host"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionsBench(PairBench):
    """Time to the first token of a second turn, with the history's KV kept and without."""

    NAME: ClassVar[str] = "sessions"
    TITLE: ClassVar[str] = "the first token of a second turn"
    COLUMNS: ClassVar[Columns] = {
        "history": "{history}",
        "way": "{name}",
        "prefilled": "{num_prefilled}",
        "first token ms": "{first_token_ms:.2f}",
        "speed-up": "{speedup:.2f}",
    }

    histories: tuple[int, ...] = (200, 400, 800)
    """Lengths of the first turn in tokens, prompt and answer together."""
    answer_tokens: int = 64
    """How many of these tokens are the answer's."""
    new_tokens: int = 16
    """Tokens that the second turn adds."""
    draft_length: int = 4
    """Tokens drafted per round."""
    prefill_chunk: int = 128
    """Prompt tokens per prefill call."""
    repeats: int = 9
    """Timed second turns of each kind; medians are reported."""

    def check(self) -> None:
        """Raises `SettingError` for options that nothing can be measured with."""
        super().check()
        if min(self.histories) <= self.answer_tokens:
            raise SettingError(
                f"--histories {min(self.histories)} was given with an answer of "
                f"{self.answer_tokens} tokens; give histories that are longer than the answer."
            )

    def measure(self) -> dict[str, Any]:
        """Milliseconds until the first token of the second turn, by length of the history."""
        target, draft = self.load()
        engine = Engine(
            target,
            DraftModel(draft),
            draft_length=self.draft_length,
            batch_size=1,
            scheduler="static",  # one row: another request has to take that of the session
            max_length=max(self.histories) + self.new_tokens + self.draft_length + 2,
            prefill_chunk=self.prefill_chunk,
        )
        engine.warm_up()
        results = []
        for history in self.histories:
            results += self._ways(engine, history)
        with engine.session() as session:
            exactness = session.exactness
        is_equal = all(each["is_equal"] for each in results)
        return {
            "results": results,
            "exactness": exactness,
            "holds": is_equal or exactness != "bitwise",
        }

    def remarks(self, document: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Whether all cases gave the same token."""
        if document["holds"]:
            return []
        return [("A session's first token is not that of the whole prompt: a bug.", "bold red")]

    def _ways(self, engine: Engine, history: int) -> list[dict[str, Any]]:
        """The second turn after one history, in each case."""
        first_prompt, added, other = (
            random_prompts(engine.target, 3, history)[index][:length]
            for index, length in enumerate((history - self.answer_tokens, self.new_tokens, 8))
        )
        sessions: dict[str, Session] = {}
        one = SamplingParams(max_tokens=1, ignore_eos=True)
        answer = SamplingParams(max_tokens=self.answer_tokens, ignore_eos=True)
        [done] = engine.generate([first_prompt], answer)
        second_prompt = [*first_prompt, *done.token_ids, *added]

        def prepare(name: str) -> None:
            """The first turn, in its own session; no other session holds a row, which would
            otherwise be copied to the host during the timed turn."""
            for session in sessions.values():
                session.close()
            if name != WITHOUT:
                sessions[name] = engine.session()
                sessions[name].generate(first_prompt, answer)
            if name == ON_HOST:
                engine.generate([other], one)
            engine.executor.wait()

        def without() -> Completion:
            [done] = engine.generate([second_prompt], one)
            return done

        turns = take_turns(
            {
                WITHOUT: without,
                IN_ROW: lambda: sessions[IN_ROW].generate(second_prompt, one),
                ON_HOST: lambda: sessions[ON_HOST].generate(second_prompt, one),
            },
            self.repeats,
            num_warm_ups=1,
            prepare=prepare,
        )
        for session in sessions.values():
            session.close()
        results = []
        for name, done in turns.results.items():
            num_reused = done.num_reused_tokens or 0
            results.append(
                {
                    "history": history,
                    "name": name,
                    "prompt_tokens": len(second_prompt),
                    "num_reused": num_reused,
                    "num_reread": done.num_reread_tokens or 0,
                    "num_prefilled": len(second_prompt) - num_reused,
                    "first_token_ms": 1e3 * turns.median_s(name),
                    "speedup": turns.speedup(name, over=WITHOUT),
                    "speedups": turns.ratios(name, over=WITHOUT),
                    "is_equal": done.token_ids == turns.results[WITHOUT].token_ids,
                }
            )
        return results
