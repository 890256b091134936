"""seeded-sampling: with a seed, the tokens depend on the logits and the seed only.

What a user sees: a request with `seed` gives another text when other requests are in flight, when
the decode batch falls into another padding bucket, or when its prompt comes in another number of
chunks. In lazy mode the first request with a seed ends the process with a segmentation fault.

Why, in three places:
* `_update_states` makes the request's `torch.Generator` on the device, and vLLM's `random_sample`
  fills one row of a tensor in place with it. In lazy mode that crashes the process.
* The rows of a sampling call are padded with copies of row 0, and
  `make_selective_sampling_metadata` gives the copies row 0's generator too. One generator then
  draws once a copy in each step, so what it draws next depends on the bucket.
* Under async scheduling an incomplete prompt is sampled and the token is thrown away, but the
  generator has drawn for it. vLLM sets the generators of such rows back; the Gaudi runner does not.

What is changed: the generator is one of the CPU. Where it is not on the device of the
probabilities, `random_sample` draws the row's exponential noise on the CPU and copies it (one copy
of [vocabulary] numbers a seeded row and step, to the device, not waited for). Only the first row
of a request has its generator; rows of incomplete prompts have none. All ranks of a tensor
parallel group draw the same, since the same seed gives the same numbers on every CPU. Requests
without a seed run what they ran: where no row has a generator, no line of this is reached. Under
`torch.compile` the draw stays outside the graph, as that of a device generator did; a test
compiles it.

For the same seed the tokens are others than those of a card's own generator.

Reference: vLLM's `_bookkeeping_sync` (the draws that it takes back). The Gaudi fork of vLLM had
the crash: HabanaAI/vllm-fork #183, #246, #627, #773, #924. Release: v0.26.0 only. The
code of v0.30.0 is the same; there a seeded request has the same text in compile mode according to
the published recipes, which leave this fix out.

Other places with the pattern:
* vLLM's `forward_cpu` has the same loop: left, the Gaudi platform uses `forward_native`.
* `generate_uniform_probs` and `sample_recovered_tokens` of the rejection sampler: left,
  speculative decoding on Gaudi is greedy.
* `_make_sampling_metadata` passes all generators by place in the batch: left, its rows are the
  batch.
* `bad_words_token_ids`, the same padding rows: `bad-words-index`.

Known limit: a prompt that is computed anew after a preemption and comes in chunks is not marked as
incomplete in its last chunks without `resumed-prefill-logits`. The segmentation fault needs a
card; what is shown here is that no generator is made on the device.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

RUNNER = "vllm_gaudi/v1/worker/hpu_model_runner.py"

FIX = Fix(
    summary="with a seed, the tokens depend on the logits and the seed only",
    symptom="a request with a seed gives another text in another batch; in lazy mode it ends the"
    " process with a segmentation fault",
    references=(
        "https://github.com/HabanaAI/vllm-fork/pull/246",
        "https://github.com/HabanaAI/vllm-fork/pull/924",
    ),
    drop_when="vllm-gaudi draws on the CPU, once for each token a request keeps",
)


@site(RUNNER, "HPUModelRunner._update_states")
def generator_on_the_cpu(code: Definition) -> None:
    """The only place where the runner makes one."""
    code.replace_expression("torch.Generator(device=self.device)", 'torch.Generator(device="cpu")')


@site("vllm/v1/sample/ops/topk_topp_sampler.py", "random_sample")
def noise_from_the_generators_device(code: Definition) -> None:
    """A generator draws where it is; a generator on the device of `q` does what it did."""
    code.replace_statement(
        "q[i].exponential_(generator=generator)",
        """
        if generator.device == q.device:
            q[i].exponential_(generator=generator)
        else:
            noise = torch.empty(q.shape[1:], dtype=q.dtype, device=generator.device)
            q[i].copy_(noise.exponential_(generator=generator), non_blocking=True)
        """,
    )


@site(
    "vllm_gaudi/v1/worker/hpu_input_batch.py",
    "InputBatch.make_selective_sampling_metadata",
)
def one_row_of_a_request(code: Definition) -> None:
    """A padding row (index seen before) has no generator."""
    code.replace_keyword(
        "generators",
        "...",
        """{
        row: self.generators[index]
        for row, index in enumerate(req_indices)
        if index in self.generators and req_indices.index(index) == row
    }""",
    )


@site(RUNNER, "HPUModelRunner._prepare_sampling")
def no_draw_for_a_token_that_is_thrown_away(code: Definition) -> None:
    """Rows of incomplete prompts, as `_extract_prefill_batch_contents` has listed them."""
    code.insert_before(
        "return sampling_metadata",
        """
        if sampling_metadata.generators and self.use_async_scheduling:
            index_of = self.input_batch.req_id_to_index
            sampling_metadata.generators = {
                row: generator
                for row, generator in sampling_metadata.generators.items()
                if index_of[req_id_output_token_ids_lst[row][0]] not in self.invalid_req_indices
            }
        """,
    )
