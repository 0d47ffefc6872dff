"""realrl's version, for everybody who would import the whole package for it."""

VERSION = "0.1.0"
