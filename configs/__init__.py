"""Configuration data; see docs/configuration.md."""
