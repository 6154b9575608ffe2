"""`python -m culax`: prove what runs on this machine. `python -m culax build`: compile kernels ahead of time."""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> int:
    """Run the doctor, or the command named first in `argv`; return the exit status."""
    if argv[:1] == ["build"]:
        from culax.runtime import build

        return build.main(argv[1:])
    from culax import doctor

    return doctor.main(argv)


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads the output has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
