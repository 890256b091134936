"""``habana_frameworks.torch.hpu.metrics``: counters of graph compilations, all zero here."""

import contextlib
from collections.abc import Iterator


class Metric:
    """The layout is that of the bridge's ``hpu/metrics/metrics.py``: pairs of name and value."""

    def stats(self) -> list[tuple[str, object]]:
        return [("TotalNumber", 0), ("TotalTime", 0), ("AvgTime", 0), ("Recipes", [])]


def metric_global(name: str) -> Metric:
    return Metric()


@contextlib.contextmanager
def metric_localcontext(name: str) -> Iterator[Metric]:
    yield Metric()
