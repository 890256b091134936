"""The command line: ``python3 fixes/apply_all.py --profile v0.30.0 [FIX ...]``."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time

from fixes.applier import fast, overlay, report
from fixes.applier.digest import VERSION, digest
from fixes.applier.errors import ImageMismatch, PackError, UsageError

# The run that has nothing to do ends within `main`; only a run that goes on loads the rest.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Any, NoReturn

    from fixes.applier.pack import Pack
    from fixes.applier.runner import Result

PREFIX = "gaudi-fix-pack:"

_EXIT_CODES = """\
exit codes:
  0  applied, or nothing to do        4  cannot write (everything rolled back)
  1  internal error                   5  another run holds the lock
  2  usage or profile error           6  libcst is missing and could not be had
  3  the image does not match
"""


class _Parser(argparse.ArgumentParser):
    """Argparse, whose errors are told like all others."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().split())
        raise UsageError(f"{message}\n{usage}")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="apply_all.py",
        description="Repair the installed vllm and vllm_gaudi: all chosen fixes, or no change.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fixes", nargs="*", metavar="FIX", help="opt-in fixes, in any order")
    parser.add_argument("--profile", metavar="RELEASE", help="the release, such as v0.30.0")
    parser.add_argument(
        "--without", action="append", default=[], metavar="FIX", help="leave a default fix out"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list a profile's fixes, or those of all")
    what.add_argument("--explain", metavar="FIX", help="say what a fix is about")
    what.add_argument("--status", action="store_true", help="say what is applied")
    what.add_argument("--revert", action="store_true", help="give the image's files back")
    parser.add_argument("--dry-run", action="store_true", help="check all, write nothing")
    parser.add_argument(
        "--diff", action="store_true", help="print the rewrite as a unified diff, write nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--site-packages", metavar="DIR", help="the packages of another environment"
    )
    parser.add_argument(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="rewrite this package only (vllm or vllm_gaudi)",
    )
    parser.add_argument(
        "--overlay",
        metavar="DIR",
        help="leave the packages as they are; build repaired ones in DIR and print the line that"
        " puts them first on the path",
    )
    parser.add_argument(
        "--lock-timeout",
        type=_seconds,
        default=120.0,
        metavar="SECONDS",
        help="how long to wait for another run (default: 120)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="sites and files as well")
    parser.add_argument("-q", "--quiet", action="store_true", help="the summary line alone")
    parser.add_argument("--version", action="version", version=f"gaudi-fix-pack {VERSION}")
    return parser


def main(root: str, argv: Sequence[str] | None = None) -> int:
    """Run the command for the pack checked out at ``root`` and return its exit code."""
    started = time.perf_counter()
    os.umask(os.umask(0o077) | 0o002)  # what this run or its pip makes, not everyone may write
    words = sys.argv[1:] if argv is None else argv
    parser = _parser()
    try:
        args = parser.parse_intermixed_args(words)
    except UsageError as error:
        args = parser.parse_args(["--json"] if "--json" in words else [])
        return _failed(error, error.exit_code, args, started)
    try:
        document = _run(root, args)
    except PackError as error:
        return _failed(error, error.exit_code, args, started)
    except OSError as error:
        return _failed(error, 4, args, started)
    except KeyboardInterrupt:
        print(f"{PREFIX} interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        import traceback

        for line in traceback.format_exc().splitlines():
            print(f"{PREFIX} {line}", file=sys.stderr)
        return _failed(error, 1, args, started)
    try:
        if document is not None:
            _print(document, args, started)
    except OSError as error:
        # Packages that were rewritten are that; in all other cases what is printed is the result.
        if args.overlay or args.list or args.explain or args.status or args.dry_run:
            return _failed(error, 4, args, started)
        print(f"{PREFIX} done, and the report could not be printed: {error}", file=sys.stderr)
    return 0


def request_of(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, in a form that does not depend on the order of the words."""
    packages = {name.replace("-", "_").lower() for name in args.package}
    folder = args.site_packages
    return {
        "profile": args.profile,
        "fixes": sorted(set(args.fixes)),
        "without": sorted(set(args.without)),
        "packages": sorted(packages),
        "site_packages": folder and os.path.realpath(folder),
    }


def _run(root: str, args: argparse.Namespace) -> dict[str, Any] | None:
    request = request_of(args)
    applies = not (args.list or args.explain or args.status or args.revert)
    overlays = _overlays(args)
    writes_nothing = args.diff or (args.dry_run and overlays)  # an overlay found becomes current
    if applies and args.profile and not writes_nothing:
        document = fast.nothing_to_do(root, request, overlays)
        if document is not None:
            return {**document, "dry_run": args.dry_run}

    from pathlib import Path

    from fixes.applier.pack import Pack

    pack = Pack(Path(root))
    if args.diff:
        _refuse(args, "--diff", "status", "revert")
    if args.list:
        _refuse(args, "--list", "fixes", "without", "package", "diff")
        return _listed(pack, args)
    if args.explain:
        _refuse(args, "--explain", "fixes", "without", "package", "diff", "json")
        return _explained(pack, args.explain)
    folder = _site_packages(args.site_packages)
    if applies:
        result = _apply(pack, args, request, folder, overlays)
    else:
        from fixes.applier import runner

        _refuse(args, "--revert" if args.revert else "--status", "fixes", "without", "package")
        if args.revert:
            result = runner.revert(
                pack,
                site_packages=folder,
                dry_run=args.dry_run,
                lock_timeout=args.lock_timeout,
            )
        else:
            result = runner.status(pack, site_packages=folder, lock_timeout=args.lock_timeout)
    if args.diff and not args.json:
        _emit("".join(_diff(result)))
        for note in result.notes:
            print(f"{PREFIX} {note}", file=sys.stderr)
        return None
    document = _document(pack, _command(args), result)
    if args.diff:
        document["diff"] = "".join(_diff(result))
    return document


def _command(args: argparse.Namespace) -> str:
    named = ("list", "explain", "status", "revert")
    return next((name for name in named if getattr(args, name)), "apply")


def _refuse(args: argparse.Namespace, option: str, *others: str) -> None:
    for other in others:
        if getattr(args, other):
            name = "a fix" if other == "fixes" else f"--{other}"
            raise UsageError(f"{option} does not go with {name}")


def _site_packages(text: str | None) -> Path | None:
    from pathlib import Path

    if text is None:
        return None
    folder = Path(text)
    if not text or not folder.is_dir():
        raise UsageError(f"--site-packages: {text!r} is no folder")
    return Path(os.path.realpath(folder))


def _overlays(args: argparse.Namespace) -> str | None:
    """The folder of the overlays, if this is a run that builds one.

    It looks for the packages behind an overlay that is on the path already.
    """
    if args.overlay is None:
        return None
    if args.list or args.explain or args.status or args.revert:
        raise UsageError("--overlay goes with a run that applies fixes; remove DIR to undo it")
    if ":" in args.overlay or "\n" in args.overlay or not args.overlay:
        raise UsageError(f"--overlay: {args.overlay!r} cannot stand in PYTHONPATH")
    sys.path[:] = [path for path in sys.path if not overlay.is_overlay(path)]
    return str(os.path.realpath(args.overlay))


def _apply(
    pack: Pack,
    args: argparse.Namespace,
    request: dict[str, Any],
    folder: Path | None,
    overlays: str | None,
) -> Result:
    from fixes.applier import locate, provision, runner
    from fixes.applier.selection import nearest, select

    if not args.profile:
        packages = locate.find_packages(runner.all_pins(pack), folder)
        fitting = runner.matching_profiles(pack, packages)
        found = (
            f"the installed packages match {', '.join(fitting)}"
            if fitting
            else "none of them matches the installed packages"
            if packages
            else "neither vllm nor vllm_gaudi is installed here"
        )
        known = ", ".join(pack.profile_names)
        raise UsageError(f"--profile is missing; profiles: {known}; {found}")
    profile = pack.profile(args.profile)
    for name in request["packages"]:
        if name not in profile.packages:
            raise UsageError(
                f"--package {name}: profile {profile.name} is about"
                f" {' and '.join(profile.packages)}{nearest(name, profile.packages)}"
            )
    selection = select(
        profile, request["fixes"], request["without"], pack.unwritten, _profiles_of(pack)
    )
    provision.require("packaging")
    if overlays is not None:
        return runner.build_overlay(
            pack,
            selection,
            request,
            overlays,
            site_packages=folder,
            only=request["packages"],
            dry_run=args.dry_run or args.diff,
        )
    return runner.apply(
        pack,
        selection,
        request,
        site_packages=folder,
        only=request["packages"],
        dry_run=args.dry_run or args.diff,
        lock_timeout=args.lock_timeout,
    )


def _profiles_of(pack: Pack) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in pack.profile_names:
        for entry in pack.profile(name).entries:
            found.setdefault(entry.id, []).append(name)
    return found


# What is printed ----------------------------------------------------------------------------------


def _document(pack: Pack, command: str, result: Result) -> dict[str, Any]:
    from dataclasses import asdict

    manifest = result.manifest
    states = {
        **dict.fromkeys(result.dropped, "taken back"),
        **dict.fromkeys(result.added, "applied"),
        **dict.fromkeys(result.kept, "applied" if command == "status" else "unchanged"),
    }
    order = [*result.dropped, *(manifest.fixes if manifest else ())]
    if result.dry_run:
        would = {"applied": "would apply", "taken back": "would take back"}
        states = {fix: would.get(state, state) for fix, state in states.items()}
    sites = pack.lock(result.profile).sites if result.profile in pack.profile_names else {}
    changed = {change.path: change for change in result.changes}
    files: list[dict[str, Any]] = []
    for path, entry in (manifest.files if manifest else {}).items():
        if path not in changed and entry.applied is not None:
            both = {"before": entry.applied.sha256, "after": entry.applied.sha256}
            files.append({"path": path, "state": "unchanged", "fixes": list(entry.fixes), **both})
    for path, change in changed.items():
        if path.endswith(".pyc"):
            continue
        entry_now = manifest.files.get(path) if manifest else None
        shipped = entry_now and entry_now.pristine
        state = (
            "rewritten"
            if shipped
            else "added"
            if entry_now
            else "restored"
            if change.new
            else "removed"
        )
        files.append(
            {
                "path": path,
                "state": state,
                "fixes": list(entry_now.fixes) if entry_now else [],
                "before": change.old and change.old.sha256,
                "after": change.new and change.new.sha256,
            }
        )
    return report.build(
        command=command,
        profile=result.profile,
        pack={"version": VERSION, "digest": digest(str(pack.root))},
        packages=[
            {"name": p.name, "folder": str(p.folder), "version": p.version, "commit": p.commit}
            for p in result.packages
        ],
        fixes={fix: states[fix] for fix in order},
        unwritten=manifest.unwritten if manifest else (),
        files=sorted(files, key=lambda file: str(file["path"])),
        locked={fix: [asdict(site) for site in sites.get(fix, ())] for fix in order},
        notes=result.notes,
        recovered=result.recovered,
        dry_run=result.dry_run,
        overlay=result.overlay,
    )


def _print(document: dict[str, Any], args: argparse.Namespace, started: float) -> None:
    if args.json:
        _emit(report.as_json(document, (time.perf_counter() - started) * 1000) + "\n")
        return
    if "text" in document:
        _emit(document["text"] + "\n")
        return
    for note in document["notes"]:
        print(f"{PREFIX} {note}", file=sys.stderr)
    lines = list(report.lines(document, verbose=args.verbose))
    if args.quiet:  # for a shell, what it has to do; for a person, what was done
        lines = [document["overlay"]["line"]] if "overlay" in document else lines[-1:]
    _emit("\n".join(lines) + "\n")


def _emit(text: str) -> None:
    """Write to standard output, bytes that are no text as they are. Nobody has to read on.

    Whether packages were rewritten does not depend on who listens, so neither does the exit code.
    Raises OSError for what cannot take it, such as a full disk.
    """
    if sys.stdout is None:
        return
    try:
        if hasattr(sys.stdout, "buffer"):
            sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the interpreter's own last flush
        if not isinstance(error, BrokenPipeError):
            raise


def _failed(error: BaseException, code: int, args: argparse.Namespace, started: float) -> int:
    for line in str(error or type(error).__name__).splitlines():
        print(f"{PREFIX} error: {line}", file=sys.stderr)
    if args.json:
        document: dict[str, Any] = {
            "schema_version": report.SCHEMA_VERSION,
            "command": _command(args),
            "pack": {"version": VERSION},
            "profile": args.profile or "",
            "dry_run": args.dry_run or args.diff,
            "error": {"kind": type(error).__name__, "message": str(error)},
            "exit_code": code,
        }
        found = getattr(error, "found", ())
        if isinstance(error, ImageMismatch) and found:
            from dataclasses import asdict

            document["error"]["mismatches"] = [asdict(mismatch) for mismatch in found]
        _emit(report.as_json(document, (time.perf_counter() - started) * 1000) + "\n")
    return code


def _diff(result: Result) -> list[str]:
    """Pristine against rewritten, as a patch that git understands."""
    import difflib

    def lines(data: bytes) -> list[str]:
        # Bytes that are no UTF-8 must come out as they are, and a patch knows one line end only.
        return re.findall(r"[^\n]*\n|[^\n]+", data.decode("utf-8", "surrogateescape"))

    found: list[str] = []
    for path, (old, new) in sorted(result.texts.items()):
        before = f"a/{path}" if old else "/dev/null"
        part = difflib.unified_diff(lines(old), lines(new), before, f"b/{path}")
        for line in part:
            found.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return found


def _listed(pack: Pack, args: argparse.Namespace) -> dict[str, Any]:
    names = [args.profile] if args.profile else pack.profile_names
    rows: list[dict[str, Any]] = []
    for name in names:
        lock = None
        for entry in pack.profile(name).entries:
            written = entry.id not in pack.unwritten
            if written and lock is None:
                lock = pack.lock(name)
            sites = lock.sites.get(entry.id, ()) if lock and written else ()
            rows.append(
                {
                    "profile": name,
                    "id": entry.id,
                    "kind": "opt-in" if entry.opt_in else "default",
                    "written": written,
                    "requires": list(entry.requires),
                    "after": list(entry.after),
                    "conflicts": list(entry.conflicts),
                    "summary": pack.fix(entry.id).fix.summary if written else "",
                    "evidence": sorted({site.evidence for site in sites}),
                }
            )
    text = []
    for name in names:
        text.append(f"{name}:")
        for row in rows:
            if row["profile"] == name:
                words = [str(row["kind"])] + ([] if row["written"] else ["not written yet"])
                words += [f"requires {other}" for other in row["requires"]]
                text.append(f"  {row['id']} ({', '.join(words)})")
                if row["summary"]:
                    text.append(f"      {row['summary']}")
                text += [f"      recorded from {evidence}" for evidence in row["evidence"]]
    return {
        "schema_version": report.SCHEMA_VERSION,
        "command": "list",
        "fixes": rows,
        "exit_code": 0,
        "text": "\n".join(text),
    }


def _explained(pack: Pack, fix_id: str) -> dict[str, Any]:
    import inspect

    from fixes.applier.selection import nearest

    where = _profiles_of(pack)
    if fix_id not in where:
        raise UsageError(f"no profile has a fix {fix_id!r}{nearest(fix_id, where)}")
    if fix_id in pack.unwritten:
        raise UsageError(f"{fix_id} is planned for {', '.join(where[fix_id])}, not written yet")
    loaded = pack.fix(fix_id)
    fix = loaded.fix
    parts = [inspect.cleandoc(loaded.doc), f"In profiles: {', '.join(where[fix_id])}"]
    parts += [f"Reference: {reference}" for reference in fix.references]
    parts += [f"{name}: {what}" for name, what in fix.environment.items()]
    parts += [f"Rewrites {site.label}" for site in loaded.sites]
    parts += [f"Relies on {label}" for label in fix.relies_on]
    parts += [f"Adds {path}" for path in fix.support]
    parts.append(f"Can be dropped: {fix.drop_when}")
    return {"text": "\n\n".join(parts[:1]) + "\n\n" + "\n".join(parts[1:])}
