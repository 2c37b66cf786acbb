"""`python -m tests.gpu.pending [--why REASON]`: record which GPU code has changed since it was tested on a GPU."""

import argparse
import json
import sys

from tests.gpu.sources import PENDING, moved, pending, record, summary


def main():
    """Write results/gpu_pending.json; a definition that has not been listed needs a reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--why", default="", help="why the definitions changed that are not listed yet")
    why = parser.parse_args().why
    known = {_definition(one["name"]): one["why"] for one in pending()}  # a file that moves keeps its reasons
    found = moved()
    if (new := [name for name in found if _definition(name) not in known]) and not why:
        sys.exit(
            f"{len(new)} definitions changed and are not listed; say why: make gpu-pending WHY=...\n" + "\n".join(new)
        )
    lines = [
        {"name": name, "file": file, "verified": record()["commit"], "why": known.get(_definition(name)) or why}
        for name, file in sorted(found.items())
    ]
    PENDING.write_text(json.dumps(lines, indent=1) + "\n")
    print(summary())


def _definition(name):
    return name.partition(" in ")[0]


if __name__ == "__main__":
    main()
