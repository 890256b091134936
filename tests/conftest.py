"""Every test session has the two-sided plugin."""

pytest_plugins = ("tests.support.twosided",)
