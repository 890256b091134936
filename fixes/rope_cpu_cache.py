"""rope-cpu-cache: the tables of rotary position embeddings are computed on the CPU.

What a user sees: with long contexts (a model with 262,144 positions, say) answers are fine up to
about 196,000 tokens and lose the thread behind that.

Why: vLLM makes a model under `with target_device:`, so that the position tables (`cos_sin_cache`)
are computed on the device, from angles that are as large as the position itself in the fastest
column. Gaudi's cosine and sine in float32 lose their argument reduction for such angles, and the
rows of late positions are wrong. The mechanism is the recipes' and vllm-gaudi's account of it;
what could be verified without a Gaudi is where the tables are computed.

What is changed: every table is computed and rounded to its type on the CPU, and then moved to
the device that a new tensor gets where the module is made. So the table is bit for bit what the
CPU computes, wherever the model is built. The places are those that call
`_compute_cos_sin_cache`, not its dozen of implementations:
* `RotaryEmbeddingBase.__init__`, for all classes that leave the table to it: plain, linear, NTK,
  dynamic NTK, YaRN, DeepSeek, Llama 3, Llama 4 vision, Gemma 4, M-RoPE, XD-RoPE, Ernie 4.5 VL,
  TeleChat 3, their HPU classes and those of other packages.
* `DeepseekV4ScalingRotaryEmbedding.__init__`, which asks for the table itself.
* `Phi3LongRoPEScaledRotaryEmbedding.__init__`, which is no `RotaryEmbeddingBase`: two tables.
* `FourierRotaryEmbedding` (FoPE), whose table needs weights: its frequencies in `__init__`, the
  table in `_compute_cos_sin_cache`. It was built in the first forward pass, inside the compiled
  graph, where the CPU has no place; now it is built as the weights are loaded, and in the
  forward pass only where none were (dummy weights).

Once a start and a kind of table; 1,048,576 positions take a third of a second.

Reference: vllm-gaudi #1817, contained in v0.30.0, whose diff was not at hand; hence v0.26.0 only.
The same class of defect: EleutherAI/gpt-neox #1003.

Other places with the pattern:
* `DualChunkRotaryEmbedding` puts its tables on `cuda` by name and cannot be made on a Gaudi:
  left.
* Vision towers and audio encoders that compute angles in each pass (`pixtral`, `kimi_k25_vit`,
  `ernie45_vl`, `minimax_m3_vision` of vllm_gaudi, a dozen in vLLM): left. Their angles are grid
  coordinates, far below the range in question.
* Models that run through vLLM's Transformers backend compute the angles in transformers, in each
  forward pass on the device: left, there is no table.
* `HPU*RotaryEmbedding.prepare_cos_sin` only picks rows of the table: nothing to do.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FOLDER = "vllm/model_executor/layers/rotary_embedding"

FIX = Fix(
    summary="tables of rotary position embeddings are computed on the CPU",
    symptom="answers degrade behind about 196,000 tokens of context",
    references=("https://github.com/vllm-project/vllm-gaudi/pull/1817",),
    drop_when="vllm-gaudi computes the tables on the CPU (v0.30.0 does, with #1817)",
)


@site(f"{FOLDER}/base.py", "RotaryEmbeddingBase.__init__")
def table_of_nearly_all_classes(code: Definition) -> None:
    """Computed and rounded on the CPU."""
    table = """
    cache = self._compute_cos_sin_cache()
    if not self.use_flashinfer: ...
    """
    code.insert_after(table, "cache = cache.to(torch.get_default_device())")
    code.wrap(table, 'with torch.device("cpu"):')


@site(f"{FOLDER}/deepseek_scaling_rope.py", "DeepseekV4ScalingRotaryEmbedding.__init__")
def table_in_float32(code: Definition) -> None:
    """The base class is told to make none."""
    table = "cache_fp32 = self._compute_cos_sin_cache()"
    code.insert_after(table, "cache_fp32 = cache_fp32.to(torch.get_default_device())")
    code.wrap(table, 'with torch.device("cpu"):')


@site(f"{FOLDER}/phi3_long_rope_scaled_rope.py", "Phi3LongRoPEScaledRotaryEmbedding.__init__")
def tables_for_short_and_long(code: Definition) -> None:
    """Both tables, and the one that they make together."""
    tables = """
    short_cache = ...
    short_cache = ...
    long_cache = ...
    long_cache = ...
    long_short_cache = ...
    """
    code.insert_after(tables, "long_short_cache = long_short_cache.to(torch.get_default_device())")
    code.wrap(tables, 'with torch.device("cpu"):')


@site(f"{FOLDER}/fope.py", "FourierRotaryEmbedding.__init__")
def frequencies_of_fope(code: Definition) -> None:
    """The table is made of these and of weights that are not there yet."""
    code.replace_statement(
        'self.register_buffer("inv_freq", self._compute_inv_freq(self.base), persistent=False)',
        """
        with torch.device("cpu"):
            inv_freq = self._compute_inv_freq(self.base)
        inv_freq = inv_freq.to(torch.get_default_device())
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        """,
    )


@site(f"{FOLDER}/fope.py", "FourierRotaryEmbedding._compute_cos_sin_cache")
def table_of_fope(code: Definition) -> None:
    """From copies of its parts on the CPU, rounded there."""
    code.replace_keyword("device", "device", '"cpu"')
    with code.within("freqs = ...") as angles:
        angles.replace_expression("self.inv_freq", "self.inv_freq.cpu()")
    code.replace_expression("self.sin_coef.float()", "self.sin_coef.cpu().float()", count=2)
    code.replace_expression("self.cos_coef.float()", "self.cos_coef.cpu().float()", count=2)
    code.replace_statement("return cache", "return cache.to(self.dtype).to(device)")


@site(f"{FOLDER}/fope.py", "FourierRotaryEmbedding.weight_loader")
def table_of_fope_as_weights_are_loaded(code: Definition) -> None:
    """After either of the two; the last one makes it right."""
    code.insert_last(
        """
        self.cos_sin_cache.copy_(self._compute_cos_sin_cache())
        self.update_cache = False
        """
    )
