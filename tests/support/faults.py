"""A fault for a running engine's workers: ``worker_extension_cls="tests.support.faults.Faults"``.

vLLM makes it a base class of its worker, in each worker's own process; a test then calls its
methods through ``LLM.collective_rpc``.
"""

from __future__ import annotations

from typing import Any

BEFORE, AFTER = "before", "after"


class Faults:
    """What a rank can be told to do wrong."""

    rank: int
    model_runner: Any

    def fail_next_sampling(self, rank: int, when: str) -> None:
        """Have that rank raise in its next `sample_tokens`, before or after the work in it.

        After it no peer waits for this rank in a collective; before it they may.
        """
        if self.rank != rank:
            return
        real = self.model_runner.sample_tokens

        def fail(*args: Any, **options: Any) -> Any:
            self.model_runner.sample_tokens = real
            if when == AFTER:
                real(*args, **options)
            raise RuntimeError(f"out of memory on rank {rank}")

        self.model_runner.sample_tokens = fail
