"""Fix modules that are not whole, and fixes that get in each other's way."""

from __future__ import annotations

import pytest

from tests.applier.world import World

FIX = '''
    """zeta: a fix."""
    from fixes.applier.fix import Fix, site

    FIX = Fix(summary="a summary", symptom="a symptom", references=("#5",), drop_when="never")

    @site("vllm/engine.py", "Engine.step")
    def step(code):
        code.insert_first("zeta()")
'''


def refused(world: World, text: str) -> str:
    """The message about the fix `zeta`, which is refused before anything is written."""
    profile = world.pack / "profiles" / "v1.0.0.toml"
    if "zeta" not in profile.read_text():
        profile.write_text(profile.read_text() + '\n[[fix]]\nid = "zeta"\nopt-in = true\n')
    world.write_fix("zeta", text)
    before = world.snapshot(times=True, state=True)
    ran = world.run("zeta", "delta")
    assert (ran.code, "Traceback" in ran.err) == (2, False), ran.err
    assert world.snapshot(times=True, state=True) == before
    return ran.err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"a summary"', '""', "Fix.summary must be one line"),
        ('"a symptom"', '"a\\nb"', "Fix.symptom must be one line"),
        ('("#5",)', '"#5"', "Fix.references must be a tuple"),
        ('"never"', '"never", relies_on="x"', "Fix.relies_on must be a tuple"),
        ('"never"', '"never", relies_on=("x.py",)', "file::qualified.name"),
        ('"never"', '"never", environment=["X"]', "must be dictionaries"),
        ('"never"', '"never", support={"../x.py": "delta_support.txt"}', "leaves the package"),
        ('"never"', '"never", support={"x.py": "delta_support.txt"}', "leaves the package"),
        ('"never"', '"never", support={"vllm/x.md": "delta_support.txt"}', "named .py"),
        ('"never"', '"never", support={"vllm/x.py": "nowhere.txt"}', "no such file beside"),
        ("FIX =", "import sys; sys.exit(0)\n    FIX =", "SystemExit"),
    ],
)
def test_a_fix_module_that_is_not_whole(world: World, old: str, new: str, said: str) -> None:
    assert said in refused(world, FIX.replace(old, new))


def test_two_codemods_of_one_fix_for_one_definition(world: World) -> None:
    again = FIX[FIX.index("    @site") :].replace("def step", "def again")
    assert "two codemods for vllm/engine.py::Engine.step" in refused(world, FIX + again)


def test_a_codemod_that_no_lock_knows_is_not_left_out(world: World) -> None:
    """Neither one without a shape nor one of the shape that the release has."""
    for shape in ("", ', shape="one"'):
        whole = FIX.replace('"Engine.step"', f'"Engine.step"{shape}')
        refused(world, whole)  # not in the lock yet
        world.record("v1.0.0", world.site)
        more = f'''
    @site("vllm/engine.py", "double"{shape})
    def more(code):
        code.insert_first("zeta()")
'''
        assert "record the lock again" in refused(world, whole + more)


def test_two_fixes_that_add_one_module(world: World) -> None:
    added = '"never", support={"vllm_gaudi/_fix_delta.py": "delta_support.txt"}'
    world.write_fix("zeta", FIX)
    refused(world, FIX)
    world.record("v1.0.0", world.site)
    said = refused(world, FIX.replace('"never"', added))
    assert "delta and zeta both add vllm_gaudi/_fix_delta.py" in said


def test_a_module_that_is_no_python_is_not_added(world: World) -> None:
    (world.pack / "fixes" / "delta_support.txt").write_text("def (\n")
    ran = world.run("delta")
    assert ran.code == 2
    assert "vllm_gaudi/_fix_delta.py" in ran.err
