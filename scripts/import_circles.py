"""Import circles: sets of modules in which each imports each other one, directly or through further modules.

The import-linter contract ``CirclesContract`` forbids them. ``.importlinter-types.toml`` applies it to all imports,
including those under ``TYPE_CHECKING``.
"""

from collections.abc import Iterator, Mapping, Set

import grimp
from importlinter import Contract, ContractCheck, fields, output
from importlinter.application import contract_utils
from importlinter.application.contract_utils import AlertLevel


def circles(imports: Mapping[str, Set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, largest first.

    Source: Tarjan, Depth-first search and linear graph algorithms (1972), with a stack in place of the recursion.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []
    for root in sorted(imports):
        if root in order:
            continue
        pending: list[tuple[str, Iterator[str]]] = []
        enter: str | None = root
        while enter is not None or pending:
            if enter is not None:
                order[enter] = lowest[enter] = len(order)
                path.append(enter)
                pending.append((enter, iter(sorted(imports.get(enter, ())))))
                enter = None
            module, rest = pending[-1]
            for imported in rest:
                if imported not in order:
                    enter = imported
                    break
                if imported in path:
                    lowest[module] = min(lowest[module], order[imported])
            if enter is not None:
                continue
            pending.pop()
            if pending:
                importer = pending[-1][0]
                lowest[importer] = min(lowest[importer], lowest[module])
            if lowest[module] == order[module]:
                start = path.index(module)
                if len(path) - start > 1:
                    found.append(sorted(path[start:]))
                del path[start:]
    return sorted(found, key=lambda circle: (-len(circle), circle))


def imports_of(graph: grimp.ImportGraph) -> dict[str, Set[str]]:
    """Return the modules that each module imports."""
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


class CirclesContract(Contract):
    """Forbids modules that import themselves through others, except by the imports listed in ``ignore_imports``."""

    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)
    unmatched_ignore_imports_alerting = fields.EnumField(AlertLevel, default=AlertLevel.ERROR)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        """Return whether the graph has no circle."""
        removal = contract_utils.remove_ignored_imports_and_report(
            graph=graph,
            ignore_imports=self.ignore_imports,
            unmatched_alerting=self.unmatched_ignore_imports_alerting,
        )
        imports = imports_of(graph)
        found = {
            ", ".join(circle): sorted(
                f"{importer} -> {imported}" for importer in circle for imported in imports[importer] & set(circle)
            )
            for circle in circles(imports)
        }
        return ContractCheck(
            kept=not found,
            warnings=list(removal.warnings),
            ignored_import_count=removal.ignored_import_count,
            metadata={"circles": found},
        )

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the modules and the imports of each circle."""
        for modules, imports in check.metadata["circles"].items():
            output.print_error(f"Circle of {modules}:", bold=True)
            for line in imports:
                output.print_error(f"- {line}", bold=False)
            output.new_line()
