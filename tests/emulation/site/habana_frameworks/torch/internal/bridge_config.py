"""``habana_frameworks.torch.internal.bridge_config``: switches of the bridge."""

import contextlib
from collections.abc import Iterator


def get_pt_compile_only_mode() -> bool:
    """Whether graphs are only compiled, not run: never here, warm-up runs for real."""
    return False


@contextlib.contextmanager
def env_setting(name: str, value: object) -> Iterator[None]:
    yield
