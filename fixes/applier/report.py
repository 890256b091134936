"""What a run says: one plain document, printed as JSON or as lines for people.

The document is built from a manifest as it stands on disk, so the run that has nothing to do says
the same without loading the rest of the applier.
"""

from __future__ import annotations

import json

# The run that has nothing to do loads nothing else.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

SCHEMA_VERSION = 1


def build(
    *,
    command: str,
    profile: str,
    pack: Mapping[str, str],
    packages: Iterable[Mapping[str, str]],
    fixes: Mapping[str, str],
    unwritten: Sequence[str],
    files: Sequence[Mapping[str, Any]],
    locked: Mapping[str, Any],
    notes: Sequence[str] = (),
    recovered: str = "",
    dry_run: bool = False,
    overlay: str = "",
) -> dict[str, Any]:
    """The document of a run; ``fixes`` maps ids to one of the states in ``_SIGNS``."""
    states = list(fixes.values())
    place = {"overlay": {"folder": overlay, "line": _path_line(overlay)}} if overlay else {}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "pack": dict(pack),
        "profile": profile,
        "dry_run": dry_run,
        "packages": [dict(package) for package in packages],
        "fixes": [
            {"id": fix, "state": state, "sites": locked.get(fix, [])}
            for fix, state in fixes.items()
        ],
        "unwritten": list(unwritten),
        "files": [dict(file) for file in files],
        "notes": list(notes),
        "recovered": recovered,
        "counts": {
            "applied": states.count("applied") + states.count("would apply"),
            "unchanged": states.count("unchanged"),
            "files": sum(file["state"] != "unchanged" for file in files),
        },
        "exit_code": 0,
        **place,
    }


def _path_line(folder: str) -> str:
    import shlex

    return f"export PYTHONPATH={shlex.quote(folder)}${{PYTHONPATH:+:$PYTHONPATH}}"


def as_json(document: Mapping[str, Any], milliseconds: float) -> str:
    """The document for programs."""
    return json.dumps({**document, "milliseconds": round(milliseconds, 1)}, indent=1)


def summary(document: Mapping[str, Any]) -> str:
    """The last line, always of this form; that of a dry run ends in ``dry-run``."""
    counts = " ".join(f"{key}={value}" for key, value in document["counts"].items())
    dry_run = " dry-run" if document["dry_run"] else ""
    return f"{counts} profile={document['profile'] or 'none'}{dry_run}"


_SIGNS = {
    "applied": "+",
    "would apply": "+",
    "unchanged": "=",
    "taken back": "-",
    "would take back": "-",
}


def lines(document: Mapping[str, Any], *, verbose: bool) -> Iterable[str]:
    """The document for people, the summary last. Notes are log lines, not results."""
    for package in document["packages"]:
        commit = f" (commit {package['commit'][:12]})" if package["commit"] else ""
        yield f"{package['name']} {package['version']}{commit} in {package['folder']}"
    if document["recovered"]:
        yield f"an interrupted run was {document['recovered']}"
    if document["dry_run"]:
        more = "else " if document["recovered"] else ""
        yield f"dry run: nothing {more}is written"
    if document["command"] == "status" and not document["fixes"]:
        yield "nothing is applied"
    for fix in document["fixes"]:
        yield f"{_SIGNS[fix['state']]} {fix['id']}: {fix['state']}"
        if verbose:
            for site in fix["sites"]:
                name = f"{site['file']}::{site['definition']}"
                yield f"    {name} {site['sha256'][:12]}, recorded from {site['evidence']}"
    if verbose:
        for file in document["files"]:
            hashes = f"{_hash(file['before'])} -> {_hash(file['after'])}"
            yield f"  {file['state']} {file['path']} {hashes}"
    if document["unwritten"]:
        yield f"not written yet, so left out: {', '.join(document['unwritten'])}"
    if "overlay" in document:
        yield document["overlay"]["line"]
    yield summary(document)


def _hash(digest: str | None) -> str:
    return digest[:12] if digest else "none"
