"""An engine's counters in Prometheus' text format, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE
from prometheus_client.registry import Collector

from jaxspec.engine.engine import Engine

__all__ = ["CONTENT_TYPE", "exposition"]

# vLLM's name after `vllm:`, the counter of `Engine.metrics`, and the help.
COUNTERS = {
    "spec_decode_num_drafts": ("num_drafts", "Rounds in which something was drafted"),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Drafted tokens"),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Drafted tokens that were emitted"),
    "prompt_tokens": ("num_prompt_tokens", "Tokens of prompts"),
    "generation_tokens": ("num_emitted_tokens", "Emitted tokens"),
    "prefix_cache_queries": ("num_prompt_tokens", "Tokens of prompts whose KV was looked for"),
    "prefix_cache_hits": ("num_reused_tokens", "Tokens of prompts whose KV was reused"),
}
GAUGES = {
    "num_requests_running": ("num_running", "Requests that have a row"),
    "num_requests_waiting": ("num_waiting", "Requests that wait for a row"),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_s",
    "inter_token_latency_seconds": "inter_token_latency_s",
    "request_time_per_output_token_seconds": "time_per_output_token_s",
    "e2e_request_latency_seconds": "e2e_latency_s",
    "request_queue_time_seconds": "queue_time_s",
    "request_prefill_time_seconds": "prefill_time_s",
    "request_decode_time_seconds": "decode_time_s",
}
OWN_COUNTERS = {
    "rounds": ("num_rounds", "Rounds of all rows"),
    "requests": ("num_requests", "Requests that had a row and have ended"),
    "dropped_kv_tokens": ("num_dropped_tokens", "Tokens whose kept KV was dropped"),
}
OWN_GAUGES = {
    "resident_kv_tokens": ("num_resident_tokens", "Tokens of sessions whose KV is in a row"),
    "parked_kv_bytes": ("parked_bytes", "Bytes of kept KV on the host"),
}


class _EngineCollector(Collector):
    """Reads an engine's counters when it is asked."""

    def __init__(self, engine: Engine, model_name: str):
        self.engine, self.labels = engine, {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Any]:
        """All families, with vLLM's labels."""
        metrics, names, values = self.engine.metrics(), [*self.labels], [*self.labels.values()]
        for prefix, table in (("vllm", COUNTERS), ("jaxspec", OWN_COUNTERS)):
            for name, (ours, text) in table.items():
                counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=names)
                counter.add_metric(values, metrics[ours])
                yield counter
        for prefix, table in (("vllm", GAUGES), ("jaxspec", OWN_GAUGES)):
            for name, (ours, text) in table.items():
                gauge = GaugeMetricFamily(f"{prefix}:{name}", text, labels=names)
                gauge.add_metric(values, metrics[ours])
                yield gauge
        num_rows = self.engine.num_residents
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of rows in use", labels=names)
        usage.add_metric(values, min(metrics["num_running"] / num_rows, 1.0))
        yield usage
        for name, ours in HISTOGRAMS.items():
            yield self._histogram(name, metrics["latencies"][ours])
        yield self._labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted so many drafted tokens",
            "position",
            dict(enumerate(metrics["num_accepted_tokens_per_pos"])),
        )
        yield self._labelled(
            "vllm:request_success",
            "Requests that have ended, by reason",
            "finished_reason",
            metrics["num_by_finish_reason"],
        )
        yield self._labelled(
            "jaxspec:rounds_by_draft_length",
            "Rounds at each draft length that `auto` chose",
            "draft_length",
            self.engine.rounds_by_draft_length,
        )
        info = InfoMetricFamily("jaxspec:engine", "The engine's promise", labels=names)
        info.add_metric(values, {"exactness": self.engine.exactness})
        yield info

    def _labelled(self, name: str, text: str, label: str, counts: dict[Any, int]) -> Any:
        family = CounterMetricFamily(name, text, labels=[*self.labels, label])
        for value, count in counts.items():
            family.add_metric([*self.labels.values(), str(value)], count)
        return family

    def _histogram(self, name: str, found: dict[str, Any]) -> Any:
        family = HistogramMetricFamily(f"vllm:{name}", name, labels=[*self.labels])
        buckets, total = [], 0
        for bound, count in zip([*found["bounds"], "+Inf"], found["counts"], strict=True):
            total += count
            buckets.append((str(bound), total))
        family.add_metric([*self.labels.values()], buckets=buckets, sum_value=found["sum"])
        return family


def exposition(engine: Engine, model_name: str) -> bytes:
    """Everything that `/metrics` returns."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_EngineCollector(engine, model_name))
    return generate_latest(registry)
