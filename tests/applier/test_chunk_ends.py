"""gdn-prefix-cache rewrites both forms of the scheduler's override; our own writing of them."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from fixes.applier.edits import rewrite
from fixes.applier.pack import Pack
from fixes.gdn_prefix_cache import SUPPORT, chunks_end_at_blocks
from tests.applier.test_docs import ROOT

SIGNATURE = """
def _mamba_block_aligned_split(self, request, num_new_tokens, num_new_local_computed_tokens=0,
                               num_external_computed_tokens=0):
"""
FORMS = {
    "counts Mamba layers": "unit, layers = self.config.chunk(), self.config.layers('mamba')",
    "counts recurrent layers": "unit, layers = self._align_to, self._recurrent_layers",
}
BODY = """
    if not layers:
        return super()._mamba_block_aligned_split(request, num_new_tokens)
    return num_new_tokens // unit * unit
"""


class Vllm:
    """The scheduler underneath: it ends chunks where blocks of seven tokens end."""

    config = SimpleNamespace(chunk=lambda: 4, layers=lambda kind: 1)
    _align_to, _recurrent_layers = 4, 1

    def _mamba_block_aligned_split(self, request: Any, tokens: int, *computed: int) -> int:
        assert len(computed) in (0, 2)
        return tokens // 7 * 7


@pytest.mark.parametrize("gdn", [True, False])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_chunks_end_at_blocks(form: str, gdn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    method = f"{SIGNATURE.rstrip()}\n    {form}{BODY}"
    text = textwrap.indent(method.strip(), "    ")
    fixed = rewrite(text, "here", [("gdn-prefix-cache", chunks_end_at_blocks.rewrite)])
    support = SimpleNamespace(chunks_end_at_blocks=lambda scheduler: gdn)
    folder, _, module = SUPPORT.removesuffix(".py").rpartition("/")
    package = SimpleNamespace(**{module: support})
    monkeypatch.setitem(__import__("sys").modules, folder.replace("/", "."), package)
    namespace: dict[str, Any] = {"Vllm": Vllm}
    exec(f"class Scheduler(Vllm):\n{fixed}", namespace)
    assert namespace["Scheduler"]()._mamba_block_aligned_split(None, 13) == (7 if gdn else 12)


def test_the_lock_of_v0_30_0_has_both_forms() -> None:
    sites = Pack(ROOT).lock("v0.30.0").sites["gdn-prefix-cache"]
    forms = [site for site in sites if site.label == chunks_end_at_blocks.label]
    assert len({site.sha256 for site in forms}) == 2
    assert "#1815" in forms[1].evidence
