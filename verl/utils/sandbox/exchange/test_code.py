"""The code of a test: the names that the program defines, the names that are refused, and the rewriting.

Two questions have no operator that a stand-in could define. So in the code of the test ``a is b`` becomes
``same(a) is same(b)``, because an object can have a trusted and an untrusted stand-in, and ``type(a)`` becomes
``kind(a)``, which asks for the class of the object.
"""

import ast
import symtable

TEST_NAME = "<test>"
SAME = "__verl_same__"
KIND = "__verl_kind__"
"""Names under which the rewritten code finds the two functions."""
_SHARED = {"inspect", "__main__", "unittest.mock", "sys.stdin"}
"""Names by which a test looks into the interpreter of the program."""


def global_names(code: str) -> set[str]:
    """Return the names that a test reads and does not define itself."""
    table = symtable.symtable(code, TEST_NAME, "exec")
    return _read_names(table) - {each.get_name() for each in table.get_symbols() if each.is_assigned()}


def _read_names(table: symtable.SymbolTable) -> set[str]:
    top = table.get_type() == "module"
    names = {each.get_name() for each in table.get_symbols() if each.is_referenced() and (top or each.is_global())}
    return names.union(*map(_read_names, table.get_children()))


def attribute_owners(tree: ast.Module) -> set[str]:
    """Return the names of which the test reads attributes, as it does with modules."""
    return {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }


def forbidden_use(tree: ast.Module) -> str | None:
    """Return a module with which the test looks into the program's interpreter; None if it has none."""
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            used = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and node.attr == "stdin":
            used = ["sys.stdin"]
        for name in used:
            if name in _SHARED:
                return name
    return None


def rewrite(tree: ast.Module) -> bool:
    """Write the test's questions of identity and class as calls; return whether it has any."""
    has_own_type = any(_defines(node, "type") for node in ast.walk(tree))
    found = False
    for node in ast.walk(tree):  # not a NodeTransformer, which recurses
        if isinstance(node, ast.Compare) and _asks_identity(node):
            node.left, *node.comparators = [_same(operand) for operand in (node.left, *node.comparators)]
            found = True
        elif isinstance(node, ast.Call) and _asks_type(node) and not has_own_type:
            node.func = ast.copy_location(ast.Name(KIND, ast.Load()), node.func)
            found = True
    return found


def _asks_identity(node: ast.Compare) -> bool:
    operands = (node.left, *node.comparators)
    return all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops) and not any(
        isinstance(operand, ast.Constant) for operand in operands
    )


def _same(operand: ast.expr) -> ast.expr:
    function = ast.copy_location(ast.Name(SAME, ast.Load()), operand)
    return ast.copy_location(ast.Call(function, [operand], []), operand)


def _asks_type(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Name)
        and node.func.id == "type"
        and len(node.args) == 1
        and not node.keywords
        and not isinstance(node.args[0], ast.Starred)
    )


def _defines(node: ast.AST, name: str) -> bool:
    stores = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    return stores or (isinstance(node, ast.arg) and node.arg == name)
