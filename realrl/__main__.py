"""``python -m realrl`` is the command ``realrl``."""

from realrl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
