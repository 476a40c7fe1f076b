"""Metrics for Prometheus: vLLM's names with the prefix `longdraft:`. Every series has the label `model_name`."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "longdraft:"
_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_TOKEN_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """The series of one server, in their own registry."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix tree.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens that the prefix tree had.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = self._counter("request_success", "Texts that finished.", "finished_reason")
        self._failed = self._counter("request_failure", "Texts and requests that failed.", "err")
        self._drafts = self._counter("spec_decode_num_drafts", "Steps that verified a draft.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self._accepted_at = self._counter("spec_decode_num_accepted_tokens_per_pos",
                                          "Draft tokens accepted, by position in the draft.", "position")
        self.first_token = self._histogram("time_to_first_token_seconds", "Time from arrival to the first token.",
                                           _LATENCY_BUCKETS_S)
        self._between_tokens = self._histogram("inter_token_latency_seconds", "Time between tokens at the client.",
                                               _TOKEN_BUCKETS_S)
        self.total_time = self._histogram("e2e_request_latency_seconds", "Time from arrival to the end of a text.",
                                          _LATENCY_BUCKETS_S)
        self.queue_time = self._histogram("request_queue_time_seconds", "Time from arrival to the start of work.",
                                          _LATENCY_BUCKETS_S)
        self._key_requests = self._counter("key_requests", "Requests of each API key that were let in.", "key")
        self._key_tokens = self._counter("key_tokens", "Tokens read and written for each API key.", "key")
        self._http = self._counter("http_requests", "Requests by route and status.", "method", "route", "status")

    def add_gauge(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """Add a series whose value is read at each scrape."""
        gauge = Gauge(PREFIX + name, help_text, ["model_name"], registry=self._registry)
        gauge.labels(self._model).set_function(value)

    def count_finished(self, reason: str) -> None:
        self._finished.labels(self._model, reason).inc()

    def count_failure(self, error: str) -> None:
        self._failed.labels(self._model, error).inc()

    def observe_draft(self, drafted: int, accepted: int) -> None:
        """Count one step's draft tokens. A step without a draft counts nothing."""
        if drafted:
            self._drafts.inc()
            self._draft_tokens.inc(drafted)
            self._accepted.inc(accepted)
            for position in range(accepted):
                self._accepted_at.labels(self._model, str(position)).inc()

    def observe_step(self, seconds: float, tokens: int) -> None:
        """Record a step that brought `tokens` tokens, `seconds` after the previous step."""
        for _ in range(tokens):
            self._between_tokens.observe(seconds / tokens)

    def count_key(self, label: str, requests: int = 0, tokens: int = 0) -> None:
        """Count what the key with this label used."""
        if requests:
            self._key_requests.labels(self._model, label).inc(requests)
        if tokens:
            self._key_tokens.labels(self._model, label).inc(tokens)

    def count_http(self, method: str, route: str, status: int) -> None:
        self._http.labels(self._model, method, route, str(status)).inc()

    def render(self) -> bytes:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """A counter for each value of `labels`; without labels, the one of this model."""
        counter = Counter(PREFIX + name, help_text, ["model_name", *labels], registry=self._registry)
        return counter if labels else counter.labels(self._model)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(PREFIX + name, help_text, ["model_name"], registry=self._registry, buckets=buckets)
        return histogram.labels(self._model)
