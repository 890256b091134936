"""Tools for those who write fixes and keep profiles; a run of the applier needs none of them."""
