"""These tests need the extra `test-serve`."""

import importlib.util

NEEDED = ("fastapi", "httpx", "openai", "prometheus_client", "uvicorn")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]
