"""`port` on the real releases: why a fix of one is not in the profile of the next."""

from __future__ import annotations

import pytest

from fixes.authoring import cli
from tests.support import absence
from tests.support.trees import Trees


def test_async_discard_counter_is_for_one_release(trees: Trees) -> None:
    assert trees.releases_of("async-discard-counter") == ["v0.26.0"]


def test_port_says_why_the_next_one_does_not_need_it(
    trees: Trees, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = trees.stock("v0.26.0"), trees.stock("v0.30.0")
    if lacking := [tree.release for tree in (old, new) if "vllm_gaudi" in tree.missing]:
        absence.skip(f"vllm_gaudi of {' and '.join(lacking)} is not at hand", *lacking)
    command = ["port", "async-discard-counter", "--profile", "v0.26.0"]
    command += ["--from", str(old.path), "--to", str(new.path)]
    assert cli.main(str(trees.root), command) == 3
    said = capsys.readouterr().out
    assert "async-discard-counter: changed" in said
    assert "the codemod does not fit" in said
    assert "vLLM counts stale frames in num_stale_output_tokens" in said
