#!/usr/bin/env python3
"""Fetch the quickstart's model and human ratings into the cache; see ``--help``."""

import sys

from realrl.data.assets.fetch import main

if __name__ == "__main__":
    sys.exit(main())
