"""The engine of the pack. It knows how to apply a fix, and nothing about any single one.

Data flows one way: ``profiles`` and ``selection`` say what is wanted, ``locate`` finds the
packages, ``plan`` turns pristine text into rewritten text in memory, ``store`` writes it, all or
nothing, and ``report`` tells. ``runner`` puts them together; ``fast`` is the run that has nothing
to do.
"""
