"""logprobs-decode-guard: a token id without a text no longer ends the server.

What a user sees: a request with `logprobs` or `prompt_logprobs` gets an id that is no token
(`-1`, a torn 64-bit value), `OverflowError: out of range integral type conversion attempted` or
`TypeError: 'NoneType' object is not iterable` is logged, and the API server ends for everybody.

Why: the front end turns the ids of the logprobs into strings one by one, in
`convert_ids_list_to_tokens`, without looking at them. A fast tokenizer raises for a negative id
or one of 2**32 and more; with a sentencepiece-style one (Metaspace) an id that has no piece, such
as a row of the padded output layer, fails in `_restore_leading_spaces`; tiktoken raises KeyError,
sentencepiece IndexError. All requests' outputs are handled in one loop, which the exception
leaves. An id that got past is read a second time: `LogprobsProcessor._correct_decoded_token`
decodes the sampled ids before a byte piece as its context.

What is changed: where decoding a list fails, its ids are decoded one by one, and one that fails
alone is the empty string, which is what vLLM's `detokenize_incrementally` makes of it. One line
is logged a process. Where a context cannot be decoded, the ids that cannot be decoded alone are
left out of it. A list of valid ids runs the code it ran before.

Whether an id is valid is left to the tokenizer, on purpose: `len(tokenizer)` is no upper bound
where the vocabulary has holes (tokens added with ids of their own), and would be computed again
for every list with tokenizers that do not cache it.

Reference: vLLM #48567 (open in July 2026) compares with `len(tokenizer)` in the first place only.
Related: #24351 and #26445, the same guard for the text of sampled tokens; #21951, #24211, #32228.
Releases: v0.26.0 and v0.30.0, same code. Where the ids of this stack come from:
`gather-logprobs-int32` and `prompt-logprobs`.

Other places with the pattern:
* `FastIncrementalDetokenizer` and `detokenize_incrementally` (a request's text) have their own
  guards.
* The OpenAI serving classes decode a sampled id that its own logprobs lack: left. An error there
  fails that request only.
* `vllm/renderers/online_derenderer.py` has a copy of `_correct_decoded_token` that decodes ids
  which a client sends: left, for the same reason.
"""

from __future__ import annotations

from fixes.applier.edits import Definition
from fixes.applier.fix import Fix, site

FIX = Fix(
    summary="a token id without a text decodes to an empty string in logprobs",
    symptom="one corrupt id in somebody's logprobs ends the API server (OverflowError, TypeError)",
    references=(
        "https://github.com/vllm-project/vllm/pull/48567",
        "https://github.com/vllm-project/vllm/issues/21951",
    ),
    drop_when="vLLM guards convert_ids_list_to_tokens and _correct_decoded_token against ids its"
    " tokenizer cannot decode",
)


@site("vllm/tokenizers/detokenizer_utils.py", "convert_ids_list_to_tokens")
def one_by_one_where_a_list_fails(code: Definition) -> None:
    """Everything after the check for an empty list goes into a `try`."""
    code.wrap(
        """
        marker = _get_leading_space_marker(tokenizer)
        if marker is None: ...
        raw_tokens = ...
        return ...
        """,
        "try:",
        footer="""
        except Exception:
            if len(token_ids) > 1:
                one_by_one = [convert_ids_list_to_tokens(tokenizer, [tid]) for tid in token_ids]
                return [text for (text,) in one_by_one]
            from vllm.logger import init_logger

            init_logger(__name__).warning_once(
                "A token id in the logprobs has no text; an empty string stands for it."
            )
            return [""]
        """,
    )


@site("vllm/v1/engine/logprobs.py", "LogprobsProcessor._correct_decoded_token")
def context_of_decodable_ids(code: Definition) -> None:
    """Where the context cannot be decoded, try again without the ids that are to blame."""
    code.wrap(
        "for num_ctx in range(1, max_ctx + 1): ...",
        "try:",
        footer="""
        except Exception:
            decodable = []
            for context_id in context_token_ids:
                try:
                    self.tokenizer.decode([context_id])
                except Exception:
                    continue
                decodable.append(context_id)
            if len(decodable) < len(context_token_ids):
                return self._correct_decoded_token(token_id, decodable)
        """,
    )
