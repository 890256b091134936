"""The Gaudi fix pack: one module a fix, and the applier that rewrites installed packages."""
