"""Every test session has the two-sided plugin and the fixtures of the emulated engine."""

pytest_plugins = ("tests.support.twosided", "tests.emulation.fixtures")
