"""What Prometheus reads: vLLM's stems under our prefix, every series with the model's name."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "longdraft:"
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The series of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens that were read.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that were written.")
        self.success = self._labelled("request_success", "Texts that came to their end.", "finished_reason")
        self.failure = self._labelled("request_failure", "Texts and requests that did not.", "err")
        self.drafts = self._counter("spec_decode_num_drafts", "Steps that verified a draft.")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Guesses that were verified.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Guesses that became text.")
        self.accepted_at = self._labelled("spec_decode_num_accepted_tokens_per_pos", "The same by place in the draft.",
                                          "position")
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCY)
        self.between = self._histogram("inter_token_latency_seconds", "Between tokens, as their reader sees it.",
                                       _BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end of a text.", _LATENCY)
        self.queued = self._histogram("request_queue_time_seconds", "From arrival to the beginning of work.", _LATENCY)
        self.http = Counter(PREFIX + "http_requests", "Requests by route and status.",
                            ["model_name", "method", "route", "status"], registry=self._registry)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A value that is asked for when Prometheus comes."""
        Gauge(PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model).set_function(value)

    def ended(self, reason: str) -> None:
        self.success.labels(self._model, reason).inc()

    def failed(self, error: str) -> None:
        self.failure.labels(self._model, error).inc()

    def stepped(self, drafted: int, accepted: int) -> None:
        """One step's guesses."""
        if drafted:
            self.drafts.inc()
            self.draft_tokens.inc(drafted)
            self.accepted.inc(accepted)
            for position in range(accepted):
                self.accepted_at.labels(self._model, str(position)).inc()

    def waited(self, seconds: float, tokens: int) -> None:
        """Tokens that came together, so long after those before them."""
        for _ in range(tokens):
            self.between.observe(seconds / tokens)

    def answered(self, method: str, route: str, status: int) -> None:
        self.http.labels(self._model, method, route, str(status)).inc()

    def text(self) -> bytes:
        """Everything, in Prometheus' format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(PREFIX + name, text, ["model_name"], registry=self._registry, buckets=buckets)
        return made.labels(self._model)
