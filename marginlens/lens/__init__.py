"""Show what a margin does to gradients: in theory (`marginlens.lens.theory`)."""
