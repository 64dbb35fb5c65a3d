"""What a server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "modelyard_requests", "requests by verb and status", ["verb", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "modelyard_request_seconds", "from the first byte to the answer", buckets=_SECONDS, registry=self.registry
        )
        self.images = Counter("modelyard_images", "images that the model was asked about", registry=self.registry)
        self.filled = Counter("modelyard_filled", "places of batches that were filled up", registry=self.registry)
        self.batch = Histogram("modelyard_batch_images", "images in a batch", buckets=_SIZES, registry=self.registry)
        self.model = Histogram(
            "modelyard_model_seconds", "of the model for a batch", buckets=_SECONDS, registry=self.registry
        )
        self.waiting = Gauge("modelyard_waiting_images", "images in the queue", registry=self.registry)
        self.version = Gauge("modelyard_version", "the version that is served", registry=self.registry)

    def batch_done(self, count: int, size: int, seconds: float) -> None:
        """A batch of ``count`` images, filled up to ``size``."""
        self.images.inc(count)
        self.filled.inc(size - count)
        self.batch.observe(count)
        self.model.observe(seconds)

    def text(self) -> bytes:
        """All of them, in Prometheus's notation."""
        return generate_latest(self.registry)
