"""The process that renders chat templates: a line of JSON in, a line of JSON out.

`jaxspec.models.chat` runs this file as a script. Its arguments are the limits: seconds of processor
time for a template, bytes of memory for the process, characters of a text. It imports nothing from
jaxspec.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase


def main() -> None:
    """Answers each line of standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and closes the pipe
    limit_s, limit_bytes, longest = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else that is printed is a reply
    tokenizer = PreTrainedTokenizerBase()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends the process
        reply = render(tokenizer, line, longest)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def render(tokenizer: PreTrainedTokenizerBase, line: str, longest: int) -> dict[str, Any]:
    """The text of a request, or the reason why there is none; transformers renders it, as it does
    for a tokenizer with this template."""
    try:
        request = json.loads(line)
        text = tokenizer.apply_chat_template(
            request["messages"],
            chat_template=request["template"],
            tokenize=False,
            **{"add_generation_prompt": True, **request["variables"]},
        )
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # templates may raise anything, most often TemplateError
        return {"error": str(error)[:1000] or type(error).__name__}
    if len(text) > longest:
        return {"error": f"it makes {len(text):,} characters of them, and {longest:,} is the limit"}
    return {"text": text}


if __name__ == "__main__":
    main()
