"""What can go wrong, each with the exit code that the README documents."""

from __future__ import annotations


class PackError(Exception):
    """Base of all errors that a user can act on; anything else is an internal error (exit 1)."""

    exit_code = 1


class UsageError(PackError):
    """The request or the pack itself makes no sense: unknown fix, bad profile."""

    exit_code = 2


class ImageMismatch(PackError):
    """The installed packages are not the ones the profile was recorded from."""

    exit_code = 3


class SiteMismatch(ImageMismatch):
    """A codemod found another number of places than it expects in its definition."""


class CannotWrite(PackError):
    """Read-only, no permission, no space. Whatever had been changed was rolled back."""

    exit_code = 4


class Busy(PackError):
    """Another run holds the lock and did not finish in time."""

    exit_code = 5


class MissingLibrary(PackError):
    """libcst is not installed and could not be provisioned."""

    exit_code = 6
