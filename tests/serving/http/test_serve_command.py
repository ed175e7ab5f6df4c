"""`jaxspec serve` as a process: it starts, serves, and ends as signals say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from served import until

from jaxspec.cli import main

pytestmark = pytest.mark.system
BODY = {"prompt": "Once", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture
def start(fast_environment):
    started = []

    def start(*options):
        command = [sys.executable, "-m", "jaxspec", "serve", "--target", "demo-target", "--json"]
        process = subprocess.Popen(
            [*command, "--port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=fast_environment,
        )
        started.append(process)
        url = json.loads(process.stdout.readline())["url"]
        health = httpx.get(f"{url}/health")
        assert health.status_code in (200, 503)
        assert until(lambda: httpx.get(f"{url}/health").status_code == 200, limit_s=300)
        return process, url

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read(url, lines, **changes):
    body = {**BODY, **changes}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as response:
        lines.extend(line for line in response.iter_lines() if line)


@pytest.mark.slow
def test_a_stream_ends_before_a_server_that_was_told_to(start):
    process, url = start("--draft", "demo-draft", "--engine-args", '{"rounds_per_piece": 1}')
    lines = []
    reader = threading.Thread(target=read, args=(url, lines))
    reader.start()
    assert until(lambda: len(lines) > 1)
    process.send_signal(signal.SIGTERM)
    reader.join()
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert process.wait(30) == 128 + signal.SIGTERM
    assert "interrupted" in process.stderr.read()


def test_a_second_signal_ends_it_at_once(start):
    process, url = start("--engine-args", '{"rounds_per_piece": 1}', "--max-length", "2048")
    lines = []

    def read_what_breaks_off():
        with pytest.raises(httpx.HTTPError):
            read(url, lines, max_tokens=2000)

    reader = threading.Thread(target=read_what_breaks_off)
    reader.start()
    assert until(lambda: len(lines) > 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.4)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 128 + signal.SIGINT
    reader.join()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--server-args", '{"max_m": 1}'), "'max_m' was given in --server-args"),
        (("--server-args", '{"max_n": 0}'), "max_n 0 was given; it must be at least 1"),
        (("--server-args", '{"api_key": "a"}'), "api_key was given in --server-args"),
        (("--engine-args", '{"batch_size": 2}'), "use --batch-size"),
        (("--host", "256.1.1.1"), "nothing can listen"),
        (("--port", "70000"), "it must be a number, at least 0"),
        (("--api-key", "@no-such-file"), "cannot be read"),
        (("--system-prompt", "no-such-file"), "--system-prompt 'no-such-file' was given, and that"),
        (("--max-sessions", "0"), "--max-sessions"),
        (("--api-key", "a b"), "The key is empty, or has other"),
    ],
)
def test_what_is_refused_at_the_start(options, words, capsys):
    assert main(["serve", "--target", "demo-target", *options]) == 1
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_an_empty_system_prompt_is_refused(tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text(" \n")
    assert main(["serve", "--target", "demo-target", "--system-prompt", str(file)]) == 1
    assert "that file is empty; fill it" in capsys.readouterr().err
