"""Any set of fixes in any order of words: one tree, whatever was there before.

What a set makes of the pristine files is computed on its own, from the release's files; the runs go
from each set to the next, so that every one of them but the first is a change of set.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence

from tests.faults.conftest import tally
from tests.faults.images import PACK, ROOT, Image

RANDOM_SETS = 50


def sets(image: Image) -> list[list[str]]:
    """Each fix with what it requires (or alone), all of them, and sets by chance."""
    ids = [entry.id for entry in image.entries]
    chance = random.Random(image.release)
    found = [image.closed([fix]) for fix in ids]
    found.append(image.closed(chance.sample(ids, len(ids))))
    while len(found) < len(ids) + 1 + RANDOM_SETS:
        found.append(image.closed(chance.sample(ids, chance.randint(0, len(ids)))))
    return found


def words(image: Image, chosen: Sequence[str], chance: random.Random) -> list[str]:
    """One of the ways to ask for a set: words in any order, default fixes named or not."""
    pairs = []
    for entry in image.profile.entries:
        if entry.id in PACK.unwritten:
            continue
        if entry.id in chosen:
            if entry.opt_in or chance.random() < 0.3:
                pairs.append([entry.id])
        elif not entry.opt_in:
            pairs.append(["--without", entry.id])
    chance.shuffle(pairs)
    return [word for pair in pairs for word in pair]


def hashes(image: Image, paths: Iterable[str]) -> dict[str, str | None]:
    """The files as they are now."""
    found = {}
    for path in paths:
        full = image.site / path
        found[path] = hashlib.sha256(full.read_bytes()).hexdigest() if full.is_file() else None
    return found


def wanted(image: Image, chosen: Sequence[str]) -> dict[str, str | None]:
    """What a set makes of the files that any set can touch."""
    support = {path for e in image.entries for path in image.fix(e.id).fix.support}
    found: dict[str, str | None] = {}
    for path in {*image.files, *support}:
        data = image.read(path)
        found[path] = None if data is None else hashlib.sha256(data).hexdigest()
    for file in image.planned(chosen):
        found[file.path] = hashlib.sha256(file.rewritten).hexdigest()
    return found


def test_every_set_in_any_order_from_any_other(image: Image) -> None:
    image.lay_out()
    chance = random.Random(image.release)
    pristine = image.snapshot(times=True, state=True)
    wrong = []
    tried = sets(image)
    for chosen in tried:
        want = wanted(image, chosen)
        where = f"{', '.join(chosen) or 'no fix'}"
        ran = image.run(*image.only, *words(image, chosen, chance), profile=image.release)
        if ran.code != 0:
            wrong.append(f"{where}: {ran.err}")
            continue
        if hashes(image, want) != want:
            wrong.append(f"{where}: another tree than from the pristine files")
        after = image.snapshot(times=True)
        again = image.run(*image.only, *words(image, chosen, chance), profile=image.release)
        if again.code != 0 or f"applied=0 unchanged={len(chosen)} files=0" not in again.last:
            wrong.append(f"{where}: the second time it says {again.last} {again.err}")
        if image.snapshot(times=True) != after:
            wrong.append(f"{where}: the second time changes something")
    assert image.run("--revert", profile=None).code == 0
    if image.snapshot(times=True, state=True) != pristine:
        wrong.append("reverting does not give the image back")
    tally("sets of fixes, each from another one", len(tried), wrong)


def test_each_fix_is_taken_back_on_its_own(image: Image) -> None:
    image.lay_out()
    pristine = image.snapshot(times=True, state=True)
    wrong = []
    for entry in image.entries:
        asked = words(image, image.closed([entry.id]), random.Random(entry.id))
        ran = image.run(*image.only, *asked, profile=image.release)
        changed = image.snapshot(times=True, state=True) != pristine
        back = image.run("--revert", profile=None)
        if ran.code or back.code or not changed:
            wrong.append(f"{entry.id}: {ran.err} {back.err}")
        if image.snapshot(times=True, state=True) != pristine:
            wrong.append(f"{entry.id}: not given back")
    tally("fixes applied to the image and taken back", len(image.entries), wrong)


def test_another_process_makes_the_same_of_all_of_them(image: Image) -> None:
    """With other hashes of strings, so another order of whatever has none."""
    image.lay_out()
    everything = image.closed(entry.id for entry in image.entries)
    want = wanted(image, everything)
    command = [sys.executable, str(ROOT / "fixes" / "apply_all.py"), "--dry-run", "--json"]
    command += ["--profile", image.release, "--site-packages", str(image.site), *image.only]
    command += words(image, everything, random.Random(1))
    for seed in ("1", "2"):
        done = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        made = {file["path"]: file["after"] for file in json.loads(done.stdout)["files"]}
        assert made == {path: want[path] for path in made}
        assert len(made) > 1
