"""What will happen if: before a flip."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ..session import current
from .parsing import pair, pairs, says_usage


@magics_class
class PlanningMagics(Magics):
    """What will happen if: before a flip."""

    @magic_arguments()
    @argument("pairs", nargs="*", type=pair, metavar="key=value", help="changes of the present settings")
    @argument("--largest-batch", action="store_true", help="the largest batch_size that fits every rank with them")
    @line_magic
    @says_usage
    def hvd_predict(self, line: str) -> Any:
        """Say what other settings would need and whether they fit, from small steps that are undone."""
        args = parse_argstring(self.hvd_predict, line)
        if args.largest_batch:
            return current().largest_batch(**pairs(args))
        return current().predict(**pairs(args))

    @magic_arguments()
    @line_magic
    @says_usage
    def hvd_what_if(self, line: str) -> Any:
        """Show what every single flip from here would need, side by side."""
        parse_argstring(self.hvd_what_if, line)
        return current().what_if()
