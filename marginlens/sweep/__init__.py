"""Many runs from one command: a grid, or the cells of a table of the paper, on this machine or on a Ray cluster."""
