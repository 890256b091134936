"""Every fix as a libcst codemod command, for libcst's own tool and its test base class.

    python3 -m libcst.tool codemod -x fixes.authoring.codemod.FixCommand --fix bad-words-index DIR

The applier itself does not go this way: see the measurements in docs/design.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import libcst as cst
from libcst.codemod import CodemodCommand, CodemodContext, SkipFile

from fixes.applier.definitions import Source, Span
from fixes.applier.edits import rewrite
from fixes.applier.pack import Pack

ROOT = Path(__file__).resolve().parents[2]


class FixCommand(CodemodCommand):
    """One fix, on whichever of its files the tool hands over; fingerprints are not looked at."""

    DESCRIPTION = "Rewrite the definitions of one fix of the pack."

    @staticmethod
    def add_args(parser: argparse.ArgumentParser) -> None:
        """The fix to run."""
        parser.add_argument("--fix", required=True, metavar="FIX")

    def __init__(self, context: CodemodContext, fix: str, pack: Pack | None = None) -> None:
        super().__init__(context)
        self.fix = (pack or Pack(ROOT)).fix(fix)

    def transform_module_impl(self, tree: cst.Module) -> cst.Module:
        """Rewrite the sites in this file. A file or a shape that is not the fix's is skipped."""
        name = Path(self.context.filename or "").as_posix()
        source = Source(name, tree.bytes)
        texts: dict[Span, str] = {}
        for site in self.fix.sites:
            spans = source.definitions.get(site.definition, [])
            if name.endswith(f"/{site.file}") and len(spans) == 1:
                text = texts.get(spans[0], source.text(spans[0]))
                texts[spans[0]] = rewrite(text, site.label, [(self.fix.id, site.rewrite)])
        if not texts:
            raise SkipFile(f"{self.fix.id} has no site here")
        return cst.parse_module(source.replaced(texts))
