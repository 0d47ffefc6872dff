"""``realrl fuse``: several models' training on the same devices at once."""

from realrl.cli.fuse.command import EXAMPLES, add_options, fuse_file, fuse_run

__all__ = ["EXAMPLES", "add_options", "fuse_file", "fuse_run"]
