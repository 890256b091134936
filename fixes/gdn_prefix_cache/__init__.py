"""gdn-prefix-cache: prefix caching on Gated DeltaNet hybrids gives the answers it gives without.

What a user sees: with `--enable-prefix-caching` a Qwen3.5 or Qwen3-Next model answers something
else as soon as a prompt begins like an earlier one: it goes on as if it had read somebody else's
text, without any error. On v0.26.0 short prompts can also end the engine (`AssertionError` in
`_form_prefill_batch`).

Why: GDN layers have a recurrent state instead of keys and values. The plugin keeps one a live
request, in a slot (`VLLM_COMPACT_GDN=1`, the default), and no other. The KV-cache manager however
counts blocks of GDN layers as cached like those of attention (mode `align`), so a request that hits
begins in the middle of its prompt with whatever is in its slot: another request's last state, or
after a preemption its own, from a later token. Stock logs `Compact GDN mode does not support
prefix caching.` and goes on. On the way:
* With `VLLM_COMPACT_GDN=0` a state is written to the block that it was read from: wrong too.
* `_form_prefill_batch` treats every prefix-cached recurrent model as Mamba2, and asserts what only
  holds there: one request a batch, a context that is a multiple of 128.
* A slot is never cleared, and a NaN in it stays one, whatever it is multiplied with.
* The runner ignores that new blocks are to be zeroed, so a page with anything but keys and values
  in it would be seen by masked attention (a NaN times 0 is a NaN).
* A request that is preempted and resumed in one step (`reset_prefix_cache` with running requests)
  keeps its row of blocks and has the new ones appended.
* Under the `HPUAsyncScheduler` of vllm-gaudi #1815 chunks of GDN prompts no longer end where blocks
  end, and blocks count as cached whose state never existed.

What is changed: the state after a full block is stored in that block's own page, which the GDN
layers of the plugin leave unused, and a hit restores it into the request's slot before the next
chunk. So the pool is as large as before, and the manager's eviction is the only one there is.
docs/gdn-prefix-cache.md explains the design. The logic is in a module of its own
(`vllm_gaudi/v1/worker/gaudi_fix_gdn_prefix_cache.py`); the runner calls it before and after it
updates its requests, and after the last forward of a step. The asserts do not apply to GDN; new
slots and pages are zeroed; preempted requests give their slot back; chunks end at block ends.
The engine refuses to start with what this does not cover, `VLLM_COMPACT_GDN=0` included, and on a
device that does not give back bit for bit what is stored. A hit on a block without a stored state
raises `StateNotStored`. With prefix caching off nothing is called.

`hybrid-decode-pad` is required: the padding of decodes would overwrite pages of the pool.

Reference: vllm-gaudi #1235 (compact slots), #1369 (another attempt), #1815 (chunk ends), #1827
(switches compact slots off instead); vLLM #30877 (mode `align`), #35219 (zeroing). Releases:
v0.26.0 and v0.30.0. On v0.30.0 the async scheduler is accepted in the form before #1815 and in
that of #1815.

Other places with the pattern:
* Mamba2 hybrids (Granite 4) have their own prefix caching in the plugin: left as it is.
* `_create_decode_input_data` looks at prefix caching too, for block tables only: right as it is.
* vLLM's priority scheduling preempts requests that it has already scheduled in the same step,
  whose blocks then count as cached and were never computed, also in attention layers: refused here.

Known limit: an answer from the cache is computed in other chunks than without it, so that with
bfloat16 two tokens that are as good as each other can change places, as with any prefix caching.
With contiguous PA the plugin switches prefix caching off itself, with a warning, before this fix is
asked. Needs PT_HPU_LAZY_MODE=0, as the recipes set it: in lazy mode each new place of a page would
be compiled anew.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"
SUPPORT = "vllm_gaudi/v1/worker/gaudi_fix_gdn_prefix_cache.py"
IMPORT = "from vllm_gaudi.v1.worker import gaudi_fix_gdn_prefix_cache"

FIX = Fix(
    summary="prefix caching that is right on Gated DeltaNet hybrids",
    symptom="with prefix caching a Qwen3.5 or Qwen3-Next model goes on from another request's"
    " state",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/1235",
        "https://github.com/vllm-project/vllm-gaudi/pull/1369",
        "https://github.com/vllm-project/vllm-gaudi/pull/1815",
        "https://github.com/vllm-project/vllm-gaudi/pull/1827",
        "https://github.com/vllm-project/vllm/pull/30877",
        "https://github.com/vllm-project/vllm/pull/35219",
    ),
    drop_when="vllm-gaudi restores the states of compact GDN layers on a prefix-cache hit",
    support={SUPPORT: "prefix_cache.py"},
    relies_on=(
        f"{RUNNER}::HPUModelRunner.prepare_mamba_state_idxs",
        "vllm/v1/core/sched/scheduler.py::Scheduler._mamba_block_aligned_split",
        "vllm/v1/core/single_type_kv_cache_manager.py::MambaManager",
    ),
)


@site(RUNNER, "HPUModelRunner.__init__")
def refuse_early(code: Definition) -> None:
    """Instead of the warning: refuse what does not work, before the model is loaded."""
    code.remove(
        """
        if ... and self.vllm_config.cache_config.enable_prefix_caching:
            logger.warning("Compact GDN mode does not support prefix caching.")
        """
    )
    code.insert_after(
        "self.use_prefix_caching = ...",
        f"""
        self.gdn_prefix_cache = None
        if self.num_gdn > 0 and self.use_prefix_caching:
            {IMPORT}
            gaudi_fix_gdn_prefix_cache.check_configuration(self)
        """,
    )


@site(RUNNER, "HPUModelRunner.initialize_kv_cache")
def use_the_pages(code: Definition) -> None:
    """The caches are there: look at their layout, test the device, and use the pages."""
    code.insert_last(
        f"""
        if self.num_gdn > 0 and self.use_prefix_caching:
            {IMPORT}
            self.gdn_prefix_cache = gaudi_fix_gdn_prefix_cache.attach(
                self, kv_cache_config, kv_caches)
        """
    )


@site(RUNNER, "HPUModelRunner.execute_model")
def before_the_first_forward(code: Definition) -> None:
    """Warm-up leaves slots and pages alone."""
    update = "batch_changed = self._update_states(scheduler_output)"
    code.insert_before(
        update,
        """
        if self.gdn_prefix_cache is not None and not warmup_mode:
            self.gdn_prefix_cache.release_preempted(scheduler_output)
        """,
    )
    code.insert_after(
        update,
        """
        if self.gdn_prefix_cache is not None and not warmup_mode:
            self.gdn_prefix_cache.begin_step(scheduler_output)
        """,
    )


@site(RUNNER, "HPUModelRunner.sample_tokens")
def after_the_last_forward(code: Definition) -> None:
    """Prefills and decodes have run; what follows is sampling."""
    code.insert_before(
        """
        if self.use_structured_output:
            logits_combined = ...
            ...
        """,
        """
        if self.gdn_prefix_cache is not None and not warmup_mode:
            self.gdn_prefix_cache.end_step(scheduler_output)
        """,
    )


@site(RUNNER, "HPUModelRunner._update_states")
def resumed_requests(code: Definition) -> None:
    """Begin a request anew that was preempted and resumed in one step; no alarm for a slot that
    was given back.
    """
    code.replace_statement(
        "unscheduled_req_ids = cached_req_ids - scheduled_req_ids",
        """
        resumed_req_ids = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        unscheduled_req_ids = cached_req_ids - (scheduled_req_ids - resumed_req_ids)
        """,
    )
    code.wrap(
        "logger.warning(..., req_id)",
        "if self.gdn_prefix_cache is None:",
    )


@site(RUNNER, "HPUModelRunner._form_prefill_batch")
def not_as_mamba2(code: Definition) -> None:
    """The blocks that Mamba2 layers write their states to: GDN layers do not look at them."""
    code.replace_expression(
        "self.use_prefix_caching",
        "self.use_prefix_caching and self.gdn_prefix_cache is None",
        count=3,
    )


@site(
    "vllm_gaudi/v1/core/sched/hpu_async_scheduler.py",
    "HPUAsyncScheduler._mamba_block_aligned_split",
)
def chunks_end_at_blocks(code: Definition) -> None:
    """Both forms of the override: chunks of GDN prompts end as in vLLM, where a state is stored."""
    code.insert_first(
        f"""
        {IMPORT}
        if gaudi_fix_gdn_prefix_cache.chunks_end_at_blocks(self):
            return super()._mamba_block_aligned_split(
                request, num_new_tokens, num_new_local_computed_tokens,
                num_external_computed_tokens)
        """
    )
