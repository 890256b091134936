"""The run that has nothing to do, without libcst, TOML or the rest of the applier.

A pod that restarts, and all but the first of eight ranks, take this way. It may only ever say
"nothing to do"; whatever it is not sure of is left to the full run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys

from fixes.applier import overlay, report
from fixes.applier.digest import LARGEST_TEXT, STATE_FOLDER, digest

# What a lock leaves out because it is so nearly always: `profiles.LockedSite`'s defaults.
_UNSAID = {"shape": "", "rewritten": True}

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def nothing_to_do(
    root: str, request: dict[str, Any], overlays: str | None = None
) -> dict[str, Any] | None:
    """The report of a run whose request is already in place, or None: look closer.

    ``root`` is the pack's checkout, ``request`` what :func:`fixes.applier.cli.request_of` made of
    the command line, ``overlays`` the folder of the overlays for a run that builds one.
    """
    try:
        return _nothing_to_do(root, request, overlays)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _nothing_to_do(
    root: str, request: dict[str, Any], overlays: str | None
) -> dict[str, Any] | None:
    profile = str(request["profile"])
    if not re.fullmatch(r"[\w.-]+", profile):
        return None
    with open(os.path.join(root, "profiles", f"{profile}.toml"), encoding="utf-8") as file:
        names = re.findall(r"^\[packages\.(\w+)\]", file.read(), re.M)
    folders = {name: folder for name in names if (folder := _folder(name, request))}
    if not folders:
        return None
    wanted = digest(root)
    if overlays is None:
        found, files = _in_place(request, wanted, folders)
    else:
        found, files = _in_overlay(request, wanted, folders, overlays)
    if found is None:
        return None
    with open(os.path.join(root, "profiles", f"{profile}.lock"), "rb") as lock:
        locked = {
            fix: [{**_UNSAID, **site} for site in sites]
            for fix, sites in json.loads(lock.read())["fixes"].items()
        }
    return report.build(
        command="apply",
        profile=profile,
        pack={"version": found["pack"], "digest": found["digest"]},
        packages=[
            {"name": name, **{key: str(entry[key]) for key in ("folder", "version", "commit")}}
            for name, entry in found["packages"].items()
        ],
        fixes=dict.fromkeys(found["fixes"], "unchanged"),
        unwritten=found["unwritten"],
        files=sorted(files, key=lambda file: str(file["path"])),
        locked=locked,
        overlay=found.get("path", ""),
    )


def _in_place(
    request: dict[str, Any], wanted: str, folders: dict[str, str]
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The manifest of the packages themselves, and their files, if they are as it says."""
    state = os.path.join(folders[next(iter(folders))], STATE_FOLDER)
    manifest = json.loads(overlay.content(os.path.join(state, "manifest.json"), LARGEST_TEXT))
    if (
        manifest["request"] != request
        or {name: entry["folder"] for name, entry in manifest["packages"].items()} != folders
        or manifest["digest"] != wanted
    ):
        return None, []
    files = []
    for path, entry in manifest["files"].items():
        applied = entry["applied"]
        if applied is not None:
            if overlay.hash_of(overlay.in_image(folders, path)) != applied["sha256"]:
                return None, []
            files.append(_unchanged(path, applied["sha256"], entry["fixes"]))
    # Last: a run that began while the files were read has left traces by now.
    names = os.listdir(state) + os.listdir(os.path.join(state, "objects"))
    if "journal.json" in names or any(name.endswith("~") for name in names):
        return None, []
    return manifest, files


def _in_overlay(
    request: dict[str, Any], wanted: str, folders: dict[str, str], overlays: str
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The same of the overlay that fits."""
    found = overlay.find(overlays, request, wanted, folders)
    if found is None or os.path.exists(
        os.path.join(folders[next(iter(folders))], STATE_FOLDER, "journal.json")
    ):
        return None, []
    path, document = found
    overlay.make_current(path)
    files = [
        _unchanged(name, entry["own"], entry["fixes"])
        for name, entry in document["files"].items()
        if entry["fixes"]
    ]
    return {**document, "path": path}, files


def _unchanged(path: str, sha256: str, fixes: list[str]) -> dict[str, Any]:
    return {"path": path, "state": "unchanged", "fixes": fixes, "before": sha256, "after": sha256}


def _folder(name: str, request: dict[str, Any]) -> str | None:
    if request["site_packages"] is not None:
        origin = os.path.join(request["site_packages"], name, "__init__.py")
        found = os.path.isfile(origin)
    else:
        spec = importlib.util.find_spec(name) if name not in sys.modules else None
        origin = (spec and spec.origin) or ""
        found = origin.endswith("__init__.py")
    return os.path.realpath(os.path.dirname(origin)) if found else None
