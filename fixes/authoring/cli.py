"""The command line of those who write fixes: ``python3 fixes/dev.py sources|record|check|...``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from fixes.applier import provision
from fixes.applier.errors import CannotWrite, ImageMismatch, PackError, UsageError
from fixes.applier.pack import Pack
from fixes.authoring import docs, finished, sources
from fixes.authoring.locks import (
    origins_of,
    record,
    refuse_contradiction,
    refuse_edited,
    written_fixes,
)
from fixes.authoring.porting import LARGEST_ISSUE, Compared, Ported, as_issue, compared, port
from fixes.authoring.scaffold import Start, new_fix
from fixes.authoring.trees import Tree
from fixes.authoring.trials import check_selections, untried

PREFIX = "gaudi-fix-pack:"
EXIT_CODES = """\
exit codes:
  0  done; `port`: nothing differs; `check`: all is current
  1  `check`: something is not current or not finished; a source cannot be had; an internal error
  2  the request makes no sense: the message says what would
  3  packages are not what they must be; `port`: something differs
  4  cannot write
  6  libcst is missing and could not be had
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dev.py",
        description="Commands for authors of fixes.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    brings = commands.add_parser("sources", help="lay out a release's packages, installed")
    sources.add_arguments(brings)

    records = commands.add_parser("record", help="write a profile's lock from its packages")
    checks = commands.add_parser(
        "check", help="are locks and pages current, and all fixes finished?"
    )
    for command in (records, checks):
        command.add_argument(
            "profiles", nargs="*", metavar="RELEASE", help="all where none is named"
        )
        command.add_argument(
            "--from", dest="tree", type=Path, metavar="DIR", help="a folder that `sources` made"
        )

    ports = commands.add_parser("port", help="compare the sites of fixes with another release")
    ports.add_argument(
        "fixes", nargs="*", metavar="FIX", help="all written ones where none is named"
    )
    ports.add_argument(
        "--profile", metavar="RELEASE", help="where the fixes are (default: the newest with them)"
    )
    ports.add_argument("--to", type=Path, required=True, metavar="DIR", help="the other packages")
    ports.add_argument(
        "--from", dest="tree", type=Path, metavar="DIR", help="the profile's packages"
    )
    forms = ports.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print one JSON document")
    forms.add_argument("--markdown", action="store_true", help="print the text of an issue")
    ports.add_argument(
        "--max-bytes",
        type=int,
        default=LARGEST_ISSUE,
        metavar="N",
        help="with --markdown: leave out diffs that make the text longer (%(default)s)",
    )

    starts = commands.add_parser("new", help="start a fix: module, test and profile lines")
    starts.add_argument("fix", metavar="FIX")
    starts.add_argument("--profile", action="append", required=True, metavar="RELEASE")
    starts.add_argument(
        "--site",
        action="append",
        required=True,
        metavar="FILE::DEFINITION",
        help="what it rewrites; may be given more than once",
    )
    starts.add_argument("--opt-in", action="store_true")
    starts.add_argument(
        "--from", dest="tree", type=Path, metavar="DIR", help="the profile's packages"
    )

    pages = commands.add_parser("docs", help="write the generated pages")
    pages.set_defaults(command="docs")
    return parser


def main(root: str, argv: Sequence[str] | None = None) -> int:
    """Run a command for the pack checked out at ``root`` and return its exit code."""
    args = _parser().parse_args(argv)
    pack = Pack(Path(root))
    try:
        provision.require("libcst")
        return _run(pack, args)
    except PackError as error:
        return _failed(error)
    except OSError as error:
        return _failed(CannotWrite(str(error)))
    except KeyboardInterrupt:
        print(f"{PREFIX} interrupted", file=sys.stderr)
        return 130


def _failed(error: PackError) -> int:
    for line in str(error).splitlines():
        print(f"{PREFIX} error: {line}", file=sys.stderr)
    return error.exit_code


def _run(pack: Pack, args: argparse.Namespace) -> int:
    if args.command == "sources":
        return sources.run(pack, args)
    if args.command == "new":
        return _new(pack, args)
    if args.command == "port":
        return _port(pack, args)
    if args.command == "docs":
        for path, text in docs.pages(pack).items():
            _write(path, text)
            print(f"wrote {path.relative_to(pack.root)}")
        return 0
    return _locks(pack, args)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CannotWrite(
            f"cannot write {path}: {error.strerror}; use a checkout of your own"
        ) from error


def _pristine(folder: Path) -> Tree:
    """A folder of packages that somebody named: rewritten ones say nothing of a release."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder")
    if any(folder.glob("*/.gaudi-fix-pack/manifest.json")):
        raise UsageError(
            f"{folder} has fixes applied: give pristine packages, or take them back with"
            f" `python3 fixes/apply_all.py --revert --site-packages {folder}`"
        )
    return Tree(folder)


@contextmanager
def _packages_of(pack: Pack, name: str, folder: Path | None) -> Iterator[Tree]:
    """The packages of a profile: in the folder that was named, or laid out for the moment."""
    profile = pack.profile(name)
    if folder is not None:
        yield _pristine(folder)
        return
    with tempfile.TemporaryDirectory(prefix="gaudi-fix-pack-") as temporary:
        into = Path(temporary) / "site-packages"
        sources.lay_out(name, list(profile.packages.values()), into, bytecode=False)
        yield Tree(into)


def _locks(pack: Pack, args: argparse.Namespace) -> int:
    names = args.profiles or pack.profile_names
    if args.tree is not None and len(names) != 1:
        raise UsageError(
            f"--from is the packages of one release: name it, as in"
            f" `{args.command} {names[-1]} --from {args.tree}`"
        )
    stale = []
    for name in names:
        with _packages_of(pack, name, args.tree) as tree:
            path, text = _recorded(pack, name, tree)
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            print(f"{path.name} is current")
        elif args.command == "check":
            stale.append(path.name)
        else:
            _write(path, text)
            print(f"wrote {path.name}")
    if args.command == "check":
        stale += [
            str(path.relative_to(pack.root))
            for path, text in docs.pages(pack).items()
            if not path.is_file() or path.read_text(encoding="utf-8") != text
        ]
        for what in stale:
            print(f"{what} is not current: run `python3 fixes/dev.py record` and `docs`")
    unfinished = _unfinished(pack, names)
    for fix_id, faults in unfinished.items():
        if args.command == "check":
            print("\n".join(f"{fix_id} is not finished: {fault}" for fault in faults))
        else:
            print(f"note: {fix_id} is not finished: `check` says what is missing")
    return 1 if args.command == "check" and (stale or unfinished) else 0


def _unfinished(pack: Pack, names: Sequence[str]) -> dict[str, list[str]]:
    """What the fixes of some profiles have not got yet."""
    red = finished.without_red_test(pack)
    found = {}
    for fix in {fix.id: fix for name in names for fix in written_fixes(pack, pack.profile(name))}:
        faults = list(finished.missing(pack, fix))
        faults += [f"no test is red on {name}" for name in names if (fix, name) in red]
        if faults:
            found[fix] = faults
    return found


def _recorded(pack: Pack, name: str, tree: Tree) -> tuple[Path, str]:
    """The lock file of a profile with the text that it should have; says what was not tried."""
    profile = pack.profile(name)
    tree.need_packages(list(profile.packages), name)
    check_selections(profile, pack.unwritten)
    refuse_edited(pack, name, tree)
    lock = record(pack, name, tree, origins_of(tree, profile))
    path = pack.root / "profiles" / f"{name}.lock"
    if path.is_file():
        refuse_contradiction(pack.lock(name), lock, tree)
    if left := untried(lock, tree):
        print(f"note: {name}: {left}")
    return path, lock.dump()


def _profile_with(pack: Pack, fixes: Sequence[str], named: str | None) -> tuple[str, list[str]]:
    """The profile to port from (the newest that has the fixes, unless named) and what it has."""
    names = [named] if named else pack.profile_names[::-1]
    for name in names:
        entries = pack.profile(name).entries
        written = [entry.id for entry in entries if entry.id not in pack.unwritten]
        if set(fixes) <= set(written):
            return name, written
    where = f"{named} does not have" if named else "no profile has"
    raise UsageError(f"{where} all of these as written fixes: {', '.join(fixes)}")


def _port(pack: Pack, args: argparse.Namespace) -> int:
    """Exit code 0 when every definition is unchanged, 3 otherwise."""
    name, written = _profile_with(pack, args.fixes, args.profile)
    fixes, lock = pack.fixes(args.fixes or written), pack.lock(name)
    new = _pristine(args.to)
    with _packages_of(pack, name, args.tree) as old:
        found = port(fixes, lock, old, new)
        packages = compared(fixes, lock, old, new)
    if args.json:
        document = {
            "schema_version": 1,
            "profile": name,
            "packages": [asdict(package) for package in packages],
            "sites": [asdict(one) for one in found],
        }
        print(json.dumps(document, indent=1))
    elif args.markdown:
        print(as_issue(found, packages, name, _port_command(args, name), args.max_bytes), end="")
    else:
        _print_ported(found, packages)
    return 0 if all(one.state == "unchanged" for one in found) else 3


def _port_command(args: argparse.Namespace, profile: str) -> str:
    """What somebody else can run, the profile named."""
    words = ["python3", "fixes/dev.py", "port", *args.fixes, "--profile", profile]
    words += ["--from", str(args.tree)] if args.tree else []
    return shlex.join([*words, "--to", str(args.to), "--markdown"])


def _print_ported(found: Sequence[Ported], packages: Sequence[Compared]) -> None:
    for one in found:
        print(f"{one.users}: {one.state}: {one.label}" + (f" ({one.detail})" if one.detail else ""))
        if one.diff:
            print(one.diff)
    for package in packages:
        if package.absent:
            print(
                f"the recorded source of {package.name} is not at hand, so no diff can be shown"
                f" and the lock was not checked against it: {package.absent}"
            )


def _new(pack: Pack, args: argparse.Namespace) -> int:
    if args.tree is not None and len(args.profile) > 1:
        raise UsageError(
            f"--from is the packages of one release, and {' and '.join(args.profile)} are"
            f" {len(args.profile)}: leave --from out, or start with one of them, add the lines to"
            " the other profile and record it from its own packages"
        )
    sites = [Start.of(word) for word in dict.fromkeys(args.site)]
    new_fix(pack, args.fix, args.profile, sites, opt_in=args.opt_in)  # refused before it takes long
    with ExitStack() as stack:
        trees = {
            name: stack.enter_context(_packages_of(pack, name, args.tree)) for name in args.profile
        }
        sites = [_fitted(site, trees[args.profile[0]]) for site in sites]
        made = new_fix(pack, args.fix, args.profile, sites, opt_in=args.opt_in)
        with _written(made):  # and nothing is left half-made where a release cannot be recorded
            locks = [_recorded(Pack(pack.root), name, tree) for name, tree in trees.items()]
    for path, text in locks:
        _write(path, text)
    for path in (*made, *(path for path, _ in locks)):
        print(f"wrote {path.relative_to(pack.root)}")
    print("next: write the test and the codemod, then `python3 fixes/dev.py record` and `docs`;")
    print("      `check` says what is missing")
    return 0


def _fitted(site: Start, tree: Tree) -> Start:
    if not tree.has(site.file):  # published fingerprints may have it
        return site
    text = tree.text(site.file, site.definition)
    if text is None:
        reason = tree.why_no_text(site.file, site.definition)
        raise ImageMismatch(f"{site.file}::{site.definition}: {reason}")
    return site.on(text)


@contextmanager
def _written(files: Mapping[Path, str]) -> Iterator[None]:
    """Files that are there for good only where what follows goes well."""
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    try:
        for path, text in files.items():
            _write(path, text)
        yield
    except BaseException:
        for path, data in before.items():
            if data is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(data)
        raise
