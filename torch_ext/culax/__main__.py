"""`python -m culax`: prove what runs on this machine. `python -m culax build`: compile kernels ahead of time."""

from __future__ import annotations

import sys


def main(argv: list[str]) -> int:
    """Run the doctor, or the command named first in `argv`; return the exit status."""
    if argv[:1] == ["build"]:
        from culax.runtime import build

        return build.main(argv[1:])
    from culax import doctor

    return doctor.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
