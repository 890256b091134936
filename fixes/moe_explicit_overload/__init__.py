"""moe-explicit-overload: the fp8 mixture of experts is called by the name of its overload.

What a user sees: prefills of fp8 MoE models are slower than they need to be; a profile shows a
copy from the device and a wait in every MoE layer of an eager step.

Why: `torch.ops.hpu.mixture_of_experts` is a packet of overloads. torch tries them in the order of
their registration, and where an argument is of another type than the schema wants it writes an
error message with the argument's `repr`, which it throws away when a later overload fits. The
call with dynamic scales (`d_scale_hidden_states` [tokens, 1]) is tried against
`fp8_fused_weights_scalars`, where that is a float, before it reaches `fp8_fused_weights_dynamic`:
formatting a tensor copies it to the host and waits for everything before it. With one token there
is no message, because a tensor of one element converts to a float: it is read, which waits just
as well. In a compiled
graph the overload is chosen once, as it is traced. The mechanism was reproduced with PyTorch's
dispatcher and schemas from Habana's open headers; the order of registration on a given release of
the Gaudi software could not be seen. In the other order the static call formats two scales an
expert.

What is changed: the two callees of `VllmMixtureOfExpertsOpFP8PerChannel.forward`:
`fp8_fused_weights_dynamic` and `fp8_fused_weights`, the overloads that the packet found. The
arguments are the same. Where an overload does not exist, or does not know one of the keywords
(`chunk_size`, `total_experts`, and from v0.30.0 `is_gated` of Nemotron-H), the packet is called
as before; that is looked up once, at the first call.

Reference: none found upstream. vllm-gaudi #1666 brought `is_gated`; #1731 (v0.30.0) gathers
experts in small batches and leaves this call for the rest. Releases: v0.26.0 and v0.30.0.

Other places with the pattern, all in `vllm_gaudi/extension`, and what was decided:
* `mixture_of_experts` in `VllmMixtureOfExpertsOp` (2 calls), `VllmMixtureOfExpertsOpFP8` (2) and
  `VllmMixtureOfExpertsOpWNA16` (2): left. They give bf16 weights and no scales; only
  `fused_weights` has these names, all before it fail by a missing name, without a message that
  holds a tensor. A test shows it for the first; the others make the same call.
* `mixture_of_experts.bias_fused_weights` (2), `.mxfp4_fused_weights` and
  `.bias_mxfp4_fused_weights` name their overload already.
* `cast_to_fp8_v2` (in this `forward` with static scales, `dynamic_quant`, `apply_fp8_linear_hpu`
  and `scaled_fp8_quant` of `ops.py`; the KV cache, the matrix product and the attention of
  `utils.py`), `fp8_gemm_v2` (`apply_fp8_linear_hpu`, `FP8Matmul`) and `cast_from_fp8` (KV cache
  and attention): left. The overload with a tensor as scale is the default one and tried first, so
  a tensor matches at once; a number that is tried against a tensor is formatted without the
  device. The two that take part in this call are in its tests.
* `convert_from_uint4`, `block_softmax*`, `softmax_fa2`, `sdpa_recomp_fwd`, `fp8_sdpa_recomp_fwd`:
  left, one overload each, or a tensor where each of them has one.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="the fp8 mixture of experts is called by the name of its overload",
    symptom="every MoE layer of an fp8 model copies a tensor to the host in an eager prefill",
    references=(
        "https://github.com/vllm-project/vllm-gaudi/pull/1666",
        "https://github.com/vllm-project/vllm-gaudi/pull/1731",
    ),
    drop_when="vllm-gaudi names the overload in VllmMixtureOfExpertsOpFP8PerChannel.forward",
    support={"vllm_gaudi/extension/gaudi_fix_moe_overload.py": "moe_overload.py"},
)


@site("vllm_gaudi/extension/ops.py", "VllmMixtureOfExpertsOpFP8PerChannel.forward")
def callees(code: Definition) -> None:
    """In the branch with dynamic scales and in the one with static scales."""
    code.insert_first("from vllm_gaudi.extension import gaudi_fix_moe_overload")
    code.replace_expression(
        "torch.ops.hpu.mixture_of_experts",
        "gaudi_fix_moe_overload.for_fp8(self.w13_input_scale is None, kwargs)",
        count=2,
    )
