"""What operators chart: plain counters that the hot path adds to, and the collector that publishes them.

No label ever comes from a client: the model label is the served name, the rest are closed sets of our own.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine import Engine, EngineStatus, Usage

LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
             40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
"""vLLM's time-to-first-token buckets: its dashboards keep their meaning."""
TOKEN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0,
           2.5, 5.0, 10.0, 20.0, 40.0, 80.0)  # fmt: skip
LAG_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)

LAG_INTERVAL_S = 0.25
SOURCES = ("device", "host", "disk", "shared")
"""Where reused blocks may have been."""
TIER_GAUGES = {
    "records": "Records kept",
    "bytes": "Bytes used",
    "budget_bytes": "Bytes that may be used",
    "suspended": "1 = nothing is written for now",
}
TIER_COUNTERS = {
    "hits": "Records read and found sound",
    "read_bytes": "Payload bytes read",
    "written_records": "Records written",
    "written_bytes": "Bytes written",
    "expired": "Records whose time was over",
    "evicted": "Records that gave way before their time",
    "deleted": "Records deleted on request",
    "dropped": "Records that could not be written",
}


class Histogram:
    """Counts by bucket; an observation costs one bisection (prometheus-client's takes a lock and labels)."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus wants them."""
        rows, below = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            below += count
            rows.append((bound, float(below)))
        return rows

    @property
    def total(self) -> float:
        return self._total


class Telemetry:
    """The server's counters. Read and written on the event loop's thread only."""

    def __init__(self) -> None:
        self.time_to_first_token_s = Histogram(LATENCY_S)
        self.inter_token_latency_s = Histogram(TOKEN_S)
        self.request_latency_s = Histogram(LATENCY_S)
        self.queue_time_s = Histogram(LATENCY_S)
        self.event_loop_lag_s = Histogram(LAG_S)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.cached_by_source: Counter[str] = Counter()
        """The cached tokens by where they were: device, host, disk, shared."""
        self.load_time_s = Histogram(LATENCY_S)
        """How long requests waited for blocks from below the device."""
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        """Choices by finish reason."""
        self.rejections: Counter[str] = Counter()
        """Requests refused for now (429, 503) by error code."""
        self.responses: Counter[int] = Counter()
        """HTTP answers by status; 499 = the client left first."""
        self.disconnects = 0
        """Requests whose client left before the end."""

    def count_usage(self, usage: Usage) -> None:
        """Add the prompt side of one finished request (tokens generated are counted as they come)."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.cached_by_source.update(usage.cache.sources)
        if usage.cache.load_s:
            self.load_time_s.observe(usage.cache.load_s)
        self.queue_time_s.observe(usage.queued_s)

    async def watch_event_loop(self) -> None:
        """Sample how late the loop wakes up, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.event_loop_lag_s.observe(max(0.0, loop.time() - due))


class MetricsCollector(Collector):
    """Publishes `Telemetry` and the engine's gauges in Prometheus' form."""

    def __init__(self, telemetry: Telemetry, engine: Engine, model_name: str, vllm_names: bool) -> None:
        self._telemetry, self._engine, self._model = telemetry, engine, model_name
        self._prefixes = ("artesian_", "vllm:") if vllm_names else ("artesian_",)

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        for prefix in self._prefixes:
            yield from self._popular(prefix, status)
        yield from self._own(status)
        yield from self._tiers()

    def _popular(self, prefix: str, status: EngineStatus) -> Iterator[Metric]:
        """The names that people already chart."""
        telemetry = self._telemetry
        used = 1 - status.blocks_free / status.blocks_total if status.blocks_total else 0.0
        yield self._gauge(prefix + "num_requests_running", "Requests in the running batch", status.running)
        yield self._gauge(prefix + "num_requests_waiting", "Requests waiting to run", status.waiting)
        yield self._gauge(prefix + "kv_cache_usage_perc", "Used share of the KV blocks, 0 to 1", used)
        yield self._counter(prefix + "prompt_tokens", "Prompt tokens processed", telemetry.prompt_tokens)
        yield self._counter(prefix + "generation_tokens", "Tokens generated", telemetry.generation_tokens)
        yield self._counter(
            prefix + "prefix_cache_queries", "Prompt tokens looked up", telemetry.prompt_tokens
        )
        yield self._counter(
            prefix + "prefix_cache_hits", "Prompt tokens found cached", telemetry.cached_tokens
        )
        yield self._by_label(
            prefix + "request_success", "Finished choices", "finished_reason", telemetry.finished
        )
        for name, what, histogram in (
            ("time_to_first_token_seconds", "Arrival to first token", telemetry.time_to_first_token_s),
            ("inter_token_latency_seconds", "Time between tokens", telemetry.inter_token_latency_s),
            ("request_queue_time_seconds", "Arrival to first step", telemetry.queue_time_s),
            ("e2e_request_latency_seconds", "Arrival to last token", telemetry.request_latency_s),
        ):
            yield self._histogram(prefix + name, what, histogram)

    def _own(self, status: EngineStatus) -> Iterator[Metric]:
        telemetry = self._telemetry
        yield self._gauge("artesian_num_tokens_waiting", "Prompt tokens waiting", status.waiting_tokens)
        yield self._gauge("artesian_backlog_seconds", "Estimated wait of a new request", status.backlog_s)
        yield self._gauge("artesian_kv_blocks", "KV blocks in all", status.blocks_total)
        yield self._gauge("artesian_kv_blocks_free", "KV blocks free or evictable", status.blocks_free)
        yield self._gauge("artesian_kv_blocks_cached", "KV blocks in the prefix tree", status.blocks_cached)
        yield self._counter("artesian_preemptions", "Sequences that had to start again", status.preemptions)
        yield self._counter(
            "artesian_kv_evicted_blocks", "Cached blocks that made room", status.evicted_blocks
        )
        yield self._by_label(
            "artesian_prompt_tokens_by_source",
            "Prompt tokens by where their KV came from",
            "source",
            Counter(
                {
                    **{source: telemetry.cached_by_source[source] for source in SOURCES},
                    "compute": telemetry.prompt_tokens - telemetry.cached_tokens,
                }
            ),
        )
        yield self._by_label(
            "artesian_admission_rejections", "Requests refused for now", "reason", telemetry.rejections
        )
        yield self._by_label(
            "artesian_http_responses",
            "HTTP answers",
            "status",
            Counter({str(status): count for status, count in telemetry.responses.items()}),
        )
        yield self._counter(
            "artesian_client_disconnects", "Requests whose client left early", telemetry.disconnects
        )
        yield self._histogram(
            "artesian_event_loop_lag_seconds", "How late the event loop wakes", telemetry.event_loop_lag_s
        )

    def _tiers(self) -> Iterator[Metric]:
        """The prompt cache's tiers below the device."""
        tiers = self._engine.prompt_cache.status()
        for name, what in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"artesian_cache_{name}", what, labels=["model_name", "tier"])
            for tier in tiers:
                gauge.add_metric([self._model, tier.name], float(getattr(tier, name)))
            yield gauge
        for name, what in TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"artesian_cache_{name}", what, labels=["model_name", "tier"])
            for tier in tiers:
                counter.add_metric([self._model, tier.name], getattr(tier, name))
            yield counter
        faults = CounterMetricFamily(
            "artesian_cache_faults",
            "Faults of a tier: each was a miss",
            labels=["model_name", "tier", "kind"],
        )
        for tier in tiers:
            for kind, count in tier.faults.items():
                faults.add_metric([self._model, tier.name, kind], count)
        yield faults
        yield self._histogram(
            "artesian_cache_load_seconds", "Wait for blocks of a tier", self._telemetry.load_time_s
        )

    def _gauge(self, name: str, what: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, what: str, value: int) -> Metric:
        family = CounterMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _by_label(self, name: str, what: str, label: str, values: Counter[str]) -> Metric:
        family = CounterMetricFamily(name, what, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family

    def _histogram(self, name: str, what: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, what, labels=["model_name"])
        family.add_metric([self._model], histogram.buckets(), histogram.total)
        return family
