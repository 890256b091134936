"""Fetch one source distribution with pip's own finder. Runs in the interpreter that has pip.

``pip download`` is no help: it prepares metadata, which would build vLLM, and install torch first.
The finder and the session are pip's, so every setting of the user counts: index, proxy,
certificates, credentials, find-links.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any


def explain_failures() -> None:
    """Say on standard error why an index could not be read, which pip itself only does as debug."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    collector = logging.getLogger("pip._internal.index.collector")
    collector.setLevel(logging.DEBUG)
    collector.addFilter(lambda record: record.getMessage().startswith("Could not fetch"))


def find_link(command: Any, options: Any, session: Any, distribution: str, version: str) -> Any:
    """The link of the source distribution, or None when pip's settings lead to none."""
    finder = command._build_package_finder(options, session)
    found = finder.find_all_candidates(distribution)
    return next((each.link for each in found if str(each.version) == version), None)


def download(distribution: str, version: str, target: str) -> int:
    """Write the source distribution to `target`; 3 when there is none, 4 when pip is unfamiliar."""
    explain_failures()
    try:
        create_command = import_module("pip._internal.commands").create_command
        command = create_command("download")
        arguments = ["--no-deps", "--no-binary", ":all:", f"{distribution}=={version}"]
        options, _ = command.parse_args(arguments)
        with command.main_context():
            session = command.get_default_session(options)
            link = find_link(command, options, session, distribution, version)
            if link is None:
                return 3
            url = link.url_without_fragment
            with session.get(url, headers={"Accept-Encoding": "identity"}, stream=True) as response:
                response.raise_for_status()
                with open(target, "wb") as file:
                    for chunk in response.iter_content(1 << 20):
                        file.write(chunk)
    except (ImportError, AttributeError, TypeError) as error:
        print(f"this pip has another interface: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(download(*sys.argv[1:4]))
