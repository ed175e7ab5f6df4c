"""As many questions of each of Spec-Bench's six kinds of task, in turn, spread over its file.

python docs/recipes/questions.py question.jsonl NUMBER OUT
"""

import json
import pathlib
import sys

TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # all others are MT-Bench's


def main(questions: str, number: str, out: str):
    """Writes them."""
    by_task: dict[str, list[str]] = {}
    for line in pathlib.Path(questions).read_text(encoding="utf-8").splitlines():
        category = json.loads(line)["category"]
        by_task.setdefault(category if category in TASKS else "mt_bench", []).append(line)
    count = int(number) // len(by_task)
    taken = [lines[i * len(lines) // count] for i in range(count) for lines in by_task.values()]
    pathlib.Path(out).write_text("\n".join([*taken, ""]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
