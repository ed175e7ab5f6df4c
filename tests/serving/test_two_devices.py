"""Prompts that are read on another device than the one that decodes."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parent / "two_devices.py"


@pytest.mark.slow
def test_a_prompt_is_read_on_one_device_and_decoded_on_another():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "equal 9", done.stderr
