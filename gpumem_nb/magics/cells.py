"""Code and variables on the ranks."""

from __future__ import annotations

from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from ..session import current
from ..shared.errors import InvalidInput
from ..ui.cells import CellOutput
from .parsing import says_usage, shell_of


@magics_class
class CellsMagics(Magics):
    """Code and variables on the ranks."""

    _latest: CellOutput | None = None

    @magic_arguments()
    @argument("--ranks", help="where to run, such as 0 or 0,2-3; by default everywhere")
    @argument("--out", help="store the results, a list in rank order, in this variable of the notebook")
    @argument("--quiet", action="store_true", help="show no output")
    @argument("--memory", action="store_true", help="report what the cell does to memory: peak, categories, leftovers")
    @cell_magic
    @says_usage
    def hvd(self, line: str, cell: str) -> None:
        """Run the cell on the ranks; output appears by rank while it runs, the first error at once."""
        args = parse_argstring(self.hvd, line)
        if args.out and not args.out.isidentifier():
            raise InvalidInput(f"--out {args.out!r} is not a variable name.")
        if self._latest:
            self._latest.add_late()
        output = self._latest = CellOutput(args.quiet)
        try:
            call = current().run_cell(
                shell_of(self).transform_cell(cell),
                ranks=args.ranks,
                title="<%%hvd cell>",
                result="value" if args.out else "text",
                memory=args.memory,
                show=output,
            )
        except BaseException:
            output.failed()
            raise
        results = call.get()
        output.finish(call, results if not args.out else [None] * len(results))
        if args.out:
            shell_of(self).user_ns[args.out] = results

    @magic_arguments()
    @argument("names", nargs="+", help="variables of this notebook")
    @line_magic
    @says_usage
    def hvd_push(self, line: str) -> None:
        """Copy variables of this notebook to all ranks."""
        args = parse_argstring(self.hvd_push, line)
        session = current()
        for name in args.names:
            if name not in shell_of(self).user_ns:
                raise InvalidInput(f"There is no variable {name!r} in this notebook.")
        session.push({name: shell_of(self).user_ns[name] for name in args.names})

    @magic_arguments()
    @argument("name", help="a variable on the ranks")
    @argument("--ranks", help="from where, such as 0 or 0,2-3; by default from everywhere")
    @line_magic
    @says_usage
    def hvd_pull(self, line: str) -> list[Any]:
        """Fetch a variable from the ranks, as a list in rank order."""
        args = parse_argstring(self.hvd_pull, line)
        return current().pull(args.name, ranks=args.ranks)
