"""Several processes under `jax.distributed`, each with a model and an engine of its own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import hf_checkpoints

from jaxspec import Engine, SamplingParams, load_model

SCRIPT = pathlib.Path(__file__).parent / "one_of_two_processes.py"


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def outcomes(directory: pathlib.Path) -> list[dict]:
    """What each of two processes printed, and what one of one device decodes."""
    hf_checkpoints.write_golden(directory / "hf", "qwen3")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }
    command = [sys.executable, str(SCRIPT)]
    coordinator = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [*command, str(index), coordinator, str(directory)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(2)
    ]
    try:
        printed = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    failed = [errors for process, (_, errors) in zip(started, printed, strict=True)
              if process.returncode]  # fmt: skip
    assert not failed, "\n".join(failed)
    model = load_model(directory / "saved-0")
    [expected] = Engine(model, batch_size=1, max_length=32).generate(
        [[3, 4, 5]], SamplingParams(max_tokens=6)
    )
    found = [json.loads(output.splitlines()[-1]) for output, _ in printed]
    return [each | {"expected": list(expected.token_ids)} for each in found]


def test_every_process_has_a_model_and_an_engine_of_its_own_and_no_devices_of_others(tmp_path):
    for found in outcomes(tmp_path):
        assert found["num_devices"] == [4, 2]
        assert found["is_local"]
        assert found["is_drafter_local"]
        assert found["tokens"] == found["expected"]
        assert found["on_mesh"] == [found["expected"]] * 2
        for name in ("engine_on_all", "model_on_all", "model_on_other"):
            assert "of other processes; give each process" in found[name], name
            assert "damaged" not in found[name]
