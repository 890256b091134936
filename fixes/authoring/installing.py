"""Lay a package out the way an installer does: files, dist-info, RECORD, bytecode.

The images build both packages without compiled code, so what an installation holds is the package
folder of the source tree, all data files included (both projects ship what their version control
tracks), and metadata. The metadata is the project's own, read and never executed.
"""

from __future__ import annotations

import ast
import base64
import compileall
import contextlib
import csv
import hashlib
import importlib.util
import os
import py_compile
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

from fixes.applier.provision import load_toml
from fixes.authoring.fetching import SourcesError

_REQUIREMENTS = ("requirements/common.txt", "requirements.txt")
_WHEEL = """\
Wheel-Version: 1.0
Generator: gaudi-fix-pack
Root-Is-Purelib: true
Tag: py3-none-any
"""
_BUILD_LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.pyc")


@dataclass(frozen=True)
class Project:
    """What an installer has to know about one project."""

    name: str
    version: str
    metadata: str
    entry_points: str
    top_level: tuple[str, ...]


# -- metadata --------------------------------------------------------------------------------------


def read_project(root: Path, package: str, version: str) -> Project | None:
    """The project whose source tree, or installation, is `root`; None when it says nothing.

    `version` is the one to install as; a folder that is an installation already keeps its own.
    """
    for info in sorted(root.glob(f"{package}-*.dist-info")):
        return _from_dist_info(info, package)
    if (root / "PKG-INFO").is_file():
        return _from_sdist(root, package, version)
    if (root / "pyproject.toml").is_file():
        return _from_checkout(root, package, version)
    return None


def _from_dist_info(info: Path, package: str) -> Project:
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    version = Parser().parsestr(metadata, headersonly=True)["Version"]
    names = _text(info / "top_level.txt").split() or [package]
    return Project(package, version, metadata, _text(info / "entry_points.txt"), tuple(names))


def _from_sdist(root: Path, package: str, version: str) -> Project:
    headers, blank, body = _text(root / "PKG-INFO").partition("\n\n")
    common = {_project_name(line) for line in _requirements(root)}
    kept = []
    for line in headers.splitlines():
        key, _, value = line.partition(": ")
        if key == "Version":
            line = f"Version: {version}"
        if key == "Requires-Dist" and common and "extra ==" not in value:
            # The sdist was made for another device; a build for none asks for the common ones only.
            if _project_name(value) in common:
                kept.append(line)
        else:
            kept.append(line)
    egg_info = root / f"{package}.egg-info"
    names = _text(egg_info / "top_level.txt").split() or [package]
    entry_points = _text(egg_info / "entry_points.txt")
    return Project(package, version, "\n".join(kept) + blank + body, entry_points, tuple(names))


def _from_checkout(root: Path, package: str, version: str) -> Project:
    file = root / "pyproject.toml"
    project = load_toml(_text(file), str(file)).get("project", {})
    setup = _setup_arguments(_text(root / "setup.py"))
    groups: dict[str, list[str]] = {}
    if scripts := project.get("scripts"):
        groups["console_scripts"] = [f"{name} = {value}" for name, value in scripts.items()]
    for group, entries in project.get("entry-points", {}).items():
        groups[group] = [f"{name} = {value}" for name, value in entries.items()]
    for group, lines in setup.get("entry_points", {}).items():
        groups.setdefault(group, []).extend([lines] if isinstance(lines, str) else lines)
    modules = [name for name in setup.get("py_modules", []) if (root / f"{name}.py").is_file()]
    return Project(
        name=package,
        version=version,
        metadata=_render_metadata(root, project, package, version),
        entry_points="\n".join(
            "".join(f"{line}\n" for line in [f"[{group}]", *lines])
            for group, lines in sorted(groups.items())
        ),
        top_level=tuple(sorted([package, *modules])),
    )


def _render_metadata(root: Path, project: Mapping[str, Any], package: str, version: str) -> str:
    readme = project.get("readme", "")
    licence = project.get("license", "")
    headers = [
        ("Metadata-Version", "2.4"),
        ("Name", project.get("name", package)),
        ("Version", version),
        ("Summary", project.get("description", "")),
        ("Author", ", ".join(each.get("name", "") for each in project.get("authors", []))),
        ("License-Expression", licence if isinstance(licence, str) else ""),
        *(("Project-URL", f"{key}, {url}") for key, url in project.get("urls", {}).items()),
        *(("Classifier", each) for each in project.get("classifiers", [])),
        ("Requires-Python", project.get("requires-python", "")),
        ("Description-Content-Type", "text/markdown" if readme else ""),
        *(("License-File", path.name) for path in _licences(root)),
        *(("Requires-Dist", line) for line in _requirements(root)),
    ]
    body = _text(root / readme) if isinstance(readme, str) and readme else ""
    return "".join(f"{key}: {value}\n" for key, value in headers if value) + "\n" + body


def _setup_arguments(source: str) -> dict[str, Any]:
    """The keyword arguments of ``setup(...)`` that are plain values."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup":
            for keyword in node.keywords:
                with contextlib.suppress(ValueError):
                    found[keyword.arg or ""] = ast.literal_eval(keyword.value)
    return found


def _requirements(root: Path) -> list[str]:
    for name in _REQUIREMENTS:
        if (root / name).is_file():
            lines = re.sub(r"(?m)(^|\s)#.*", "", _text(root / name)).splitlines()
            return [line.strip() for line in lines if line.strip() and line[0] != "-"]
    return []


def _project_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match.group() if match else "").lower()


def _licences(root: Path) -> list[Path]:
    return [path for path in sorted(root.glob("LICEN[CS]E*")) if path.is_file()]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# -- files -----------------------------------------------------------------------------------------


def install(root: Path, project: Project, site_packages: Path, commit: str | None) -> Path:
    """Copy the package and its metadata into `site_packages`; returns the dist-info folder."""
    for name in project.top_level:
        if (root / name).is_dir():
            shutil.copytree(root / name, site_packages / name, ignore=_BUILD_LEFTOVERS)
        elif (root / f"{name}.py").is_file():
            shutil.copy2(root / f"{name}.py", site_packages)
        else:
            raise SourcesError(f"{root} holds no {name}")
        for path in [site_packages / f"{name}.py", *(site_packages / name).rglob("*.py")]:
            if path.is_file():
                path.chmod(0o644)  # as an installer does: a module is no program
    if commit:
        _write_version(site_packages / project.name / "_version.py", project.version, commit)
    info = site_packages / f"{project.name}-{project.version}.dist-info"
    info.mkdir()
    for name, text in {
        "METADATA": project.metadata,
        "WHEEL": _WHEEL,
        "INSTALLER": "pip\n",
        "top_level.txt": "".join(f"{name}\n" for name in project.top_level),
        "entry_points.txt": project.entry_points,
    }.items():
        if text:
            (info / name).write_text(text, encoding="utf-8")
    for path in _licences(root):
        (info / "licenses").mkdir(exist_ok=True)
        shutil.copyfile(path, info / "licenses" / path.name)
    return info


def _write_version(path: Path, version: str, commit: str) -> None:
    # The build writes it before it adds the local part ("+empty"), which only the metadata has.
    public = version.partition("+")[0]
    numbers = tuple(int(part) if part.isdigit() else part for part in public.split("."))
    path.write_text(
        f"# the names that setuptools-scm writes\n"
        f"__version__ = version = {public!r}\n"
        f"__version_tuple__ = version_tuple = {numbers!r}\n"
        f"__commit_id__ = commit_id = {'g' + commit[:9]!r}\n",
        encoding="utf-8",
    )


def compile_bytecode(folder: Path, final: Path) -> None:
    """Write bytecode as pip does; `final` is where `folder` will be, the place tracebacks show."""
    compileall.compile_dir(
        folder,
        quiet=2,  # pip, too, installs a module that this Python cannot compile
        stripdir=str(folder),
        prependdir=str(final),
        workers=min(2, os.cpu_count() or 1),
        invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP,
    )


def write_record(info: Path, project: Project) -> None:
    """Write RECORD: every file with its hash and size, bytecode without, as pip does."""
    site_packages = info.parent
    rows: list[tuple[str, str, str]] = []
    for path in sorted(_files_of(info, project)):
        name = path.relative_to(site_packages).as_posix()
        if path.suffix == ".pyc":
            rows.append((name, "", ""))
            continue
        content = path.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append((name, f"sha256={digest}", str(len(content))))
    rows.append((f"{info.name}/RECORD", "", ""))
    with (info / "RECORD").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _files_of(info: Path, project: Project) -> Iterator[Path]:
    site_packages = info.parent
    for folder in [info, *(site_packages / name for name in project.top_level)]:
        yield from (path for path in folder.rglob("*") if path.is_file())
        module = folder.with_suffix(".py")
        if folder != info and module.is_file():
            yield module
            bytecode = Path(importlib.util.cache_from_source(str(module)))
            if bytecode.is_file():
                yield bytecode
