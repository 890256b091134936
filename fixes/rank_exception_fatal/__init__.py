"""rank-exception-fatal: a step that fails on any rank ends the engine.

What a user sees: with tensor parallelism one worker logs `WorkerProc hit an exception.` (out of
memory in a step, say), the server goes on, and from then on every answer to everybody is garbage
(`!!!!`, NaN log probabilities) until it is restarted by hand. Or, where the other ranks wait for
the failed one, every request hangs until `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`, which the Gaudi
recipes raise to half an hour or an hour.

Why: `MultiprocExecutor` sends `execute_model` and `sample_tokens` to all ranks and reads the
answer of one, `output_rank`. A `WorkerProc` reports an exception only if it is that rank; any
other logs it and waits for the next call. It has left the step early: its collectives, KV cache
writes and sampled tokens are missing, and on Gaudi, where collectives are matched by their order,
each later one of the others is paired with the wrong one. The same silence is found in three more
places of the class:
* Under async scheduling a rank that does not answer drops its asynchronous output unread, so an
  error that shows when the step's results are copied to the host (`get_output`) is never seen
  there.
* The thread that sends asynchronous outputs ends with the first exception in it, an output that
  cannot be pickled for instance. The engine then waits for answers that nobody sends.
* With a KV or EC connector all ranks answer a step, but the engine reads the answers in the order
  of ranks: that of a failed rank comes after that of one which may be waiting for it.

And `vllm serve` with one API server ends with exit code 0 after its engine died: a supervisor
that restarts what failed leaves it.

What is changed: in a step, a rank whose answer the engine does not wait for ends its process:
exit code 1, at once, after its log is flushed (five seconds at most). The executor watches the
processes of its workers (`start_worker_monitor`): it marks itself as failed, stops the other
ranks, wakes whoever waits for an answer and tells the engine core, which fails all requests with
`EngineDeadError`. Where a rank hangs that takes as long as vLLM gives it to leave
(`VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS`, five, and four more). The process is ended with
`os._exit`: re-raising leads to `WorkerProc.shutdown`, where destroying process groups can wait
for peers that wait for this rank, and then the process never ends. Asynchronous outputs of ranks
that do not answer are waited for in the thread that exists for it; on the answering rank, an
output that cannot be sent is replaced by its error.

`vllm serve` (`serve_http`) ends with exit code 1 when it stopped because its engine died, after
the same clean-up; with several API servers it did already.

As before: the answering rank reports its exception and lives on; a utility call (`collective_rpc`
with all ranks' answers: LoRA, sleep, profile, ...) that fails is its caller's affair; what fails
while the executor is shutting its workers down ends nothing; SystemExit and KeyboardInterrupt.

Reference: none found upstream. Releases: v0.26.0, where the code is inside `worker_busy_loop`,
and v0.30.0, where it is `_execute_worker_rpc` and `serve_http` is in another module. Ray's
`RayWorkerProc` inherits it, and its executor watches the actors (every five seconds). Nothing in
vllm_gaudi overrides it.

Known limit: a call that all ranks answer and that is no step, such as those of the start-up
(`determine_available_memory`, warm-up), still waits for rank 0 first: where that one waits in
turn for a rank that failed, the start hangs. A failing utility call must not end a running
engine.

Other places with the pattern:
* Several nodes (`--nnodes`): the executor on a follower node stops that node's workers; the
  leader has no view of remote processes, and its engine fails when its own ranks notice or the
  timeout ends. Garbage is not served. `vllm serve --headless` on the follower ends with exit code
  0 after that: left.
* `worker_main` cleans up after an exception outside a call, a message that cannot be unpickled
  for instance, and can hang there: left, since the same path ends every orderly shutdown.
* `RayDistributedExecutor` and `UniProcExecutor` let exceptions through: nothing to do.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FILE = "vllm/v1/executor/multiproc_executor.py"
IMPORT = "from vllm.v1.executor import gaudi_fix_failed_rank"

FIX = Fix(
    summary="a step that fails on any rank ends the engine",
    symptom="after one rank of several hit an exception the server goes on and serves garbage, or"
    " hangs for VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    references=(),
    drop_when="vLLM's WorkerProc makes an exception in a step fatal on every rank",
    support={"vllm/v1/executor/gaudi_fix_failed_rank.py": "failed_rank.py"},
    relies_on=(
        f"{FILE}::WorkerProc.enqueue_output",
        f"{FILE}::WorkerProc.handle_output",
        f"{FILE}::MultiprocExecutor.start_worker_monitor",
        f"{FILE}::MultiprocExecutor.collective_rpc",
    ),
)


def _watch_every_call(code: Definition) -> None:
    code.insert_first(IMPORT)
    code.insert_after(
        """
        if output_rank is None or self.rank == output_rank:
            self.handle_output(output)
        """,
        "gaudi_fix_failed_rank.call_returned(self, output, output_rank)",
    )
    code.insert_after(
        """
        if output_rank is None or self.rank == output_rank:
            self.handle_output(e)
        """,
        "gaudi_fix_failed_rank.call_raised(self, method, output_rank)",
    )


@site(FILE, "WorkerProc.worker_busy_loop", shape="inline")
def inside_the_loop(code: Definition) -> None:
    """v0.26.0: a call is made in the loop itself."""
    _watch_every_call(code)


@site(FILE, "WorkerProc._execute_worker_rpc", shape="method")
def in_a_method_of_its_own(code: Definition) -> None:
    """v0.30.0: a call is made in a method."""
    _watch_every_call(code)


@site(FILE, "WorkerProc.async_output_busy_loop")
def nothing_lost_in_the_output_thread(code: Definition) -> None:
    """The thread lives on after an output that cannot be sent, or ends the process."""
    code.insert_first(IMPORT)
    code.replace_statement(
        "self.enqueue_output(output)", "gaudi_fix_failed_rank.send(self, output)"
    )


def _exit_code_of_the_server(code: Definition) -> None:
    code.insert_before(
        "return dummy_shutdown()",
        """
        engine = app.state.engine_client
        # As in terminate_if_errored, which has stopped the server then.
        if engine is not None and engine.errored and not engine.is_running:

            async def exit_with_error() -> None:
                raise SystemExit(1)

            return exit_with_error()
        """,
    )


@site("vllm/entrypoints/launcher.py", "serve_http", shape="inline")
def server_of_v0_26_0(code: Definition) -> None:
    """What is returned is awaited after the engine's client is gone."""
    _exit_code_of_the_server(code)


@site("vllm/entrypoints/launchers/launcher.py", "serve_http", shape="method")
def server_of_v0_30_0(code: Definition) -> None:
    """The same, in a package of launchers."""
    _exit_code_of_the_server(code)
