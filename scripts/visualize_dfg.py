#!/usr/bin/env python
"""Draw the dataflow graph of an experiment: `visualize_dfg.py NAME --out FILE [key=value ...]`.

FILE ends in .svg, .png, .mmd or .html. The same as `realrl graph NAME --out FILE [key=value ...]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from realrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["graph", *sys.argv[1:]]))
