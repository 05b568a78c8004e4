"""Mutation rules: each finds nodes in the syntax tree and changes the text of one line."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_FUNCTIONS = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max", "sorted": "list", "reversed": "list"},
    **{"ceil": "floor", "zeros_like": "ones_like", "zeros": "ones", "cumsum": "array"},
}
_METHODS = {"popleft": "pop", "mean": "sum", "setdefault": "get", "discard": "add", "set": "clear", "clear": "copy"}
_MESSAGES = {"announce", "_announce", "tell", "_tell", "_turn_away", "warn", "print", "write"}
_NOT_DROPPED = {"strict", "name", "daemon", "cls"}  # Without these little changes, or only a name in a list of threads.
_NOT_SWAPPED = {"isinstance", "issubclass", "zip", "map", "replace", "partial"}


@dataclass(frozen=True)
class Change:
    """A line and what it becomes; both without indentation."""

    line: int
    rule: str
    old: str
    new: str


def changes(source: str) -> list[Change]:
    """All that the rules make of a file, one line each; every one of them is Python still."""
    lines = source.split("\n")
    found = []
    for rule, line, start, end, text in _edits(ast.parse(source), lines):
        raw = lines[line - 1].encode()
        new = (raw[:start] + text.encode() + raw[end:]).decode()
        changed = [*lines[: line - 1], new, *lines[line:]]
        if new != lines[line - 1] and _compiles("\n".join(changed)):
            found.append(Change(line, rule, lines[line - 1].strip(), new.strip()))
    return list(dict.fromkeys(found))


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


Edit = tuple[str, int, int, int, str]  # rule, line, first and last byte in it, what stands there instead


def _edits(tree: ast.Module, lines: list[str]) -> Iterator[Edit]:
    for node in _code(tree):
        if node.lineno == node.end_lineno:
            yield from _of_one_line(node, lines)
        yield from _between(node, lines)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """All expressions and statements but those that say nothing to the machine: messages, annotations, docstrings."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.JoinedStr() | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.arguments():
                continue
            case ast.FunctionDef(name="__repr__" | "__str__"):
                continue
            case ast.FunctionDef():
                defaults = [*child.args.defaults, *filter(None, child.args.kw_defaults)]
                yield from _code(ast.Tuple([*defaults, *child.body], ast.Load()))
            case ast.ClassDef():
                yield from _code(ast.Module(child.body, []))
            case ast.AnnAssign():
                yield from _code(ast.Tuple([child.value] if child.value else [], ast.Load()))
            case ast.keyword(arg="strict"):
                continue  # Without it nothing changes, as long as nothing else is wrong.
            case _ if not (_is_message(child) or _is_for_types(child)):
                if isinstance(child, (ast.expr, ast.stmt, ast.Slice)):
                    yield child
                yield from _code(child)


def _is_message(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    return isinstance(call, ast.Constant) or (isinstance(call, ast.Call) and _name(call.func) in _MESSAGES)


def _is_for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return _name(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.Assign) and (_name(node.targets[0]) == "__all__" or _is_type(node.value))


def _is_type(value: ast.AST) -> bool:
    """Whether a value is an alias of types, as ``Mapping[str, int] | None``."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _is_type(value.left) or _is_type(value.right)
    return isinstance(value, ast.Subscript) and _name(value.value)[:1].isupper() and not _name(value.value).isupper()


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.AST, lines: list[str]) -> str:
    return lines[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()


def _whole(rule: str, node: ast.AST, text: str) -> Edit:
    return rule, node.lineno, node.col_offset, node.end_col_offset, text


def _of_one_line(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=bool(value)):
            yield _whole("the other truth value", node, str(not value))
        case ast.Constant(value=int(value)):
            yield _whole("a number too large by 1", node, str(value + 1))
        case ast.Constant(value=float(value)) if value:
            yield _whole("a number 10 times as large", node, str(10 * value))
        case ast.Break():
            yield _whole("continue instead of break", node, "continue")
        case ast.Continue():
            yield _whole("break instead of continue", node, "break")
        case ast.Expr(value=ast.Call()):
            yield _whole("a call that is dropped", node, "pass")
        case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
            yield _whole("None is returned", node, "return None")
        case ast.UnaryOp(op=ast.Not()) | ast.UnaryOp(op=ast.USub()):
            yield _whole("a sign that is dropped", node, f"({_text(node.operand, lines)})")
        case ast.If() | ast.IfExp():
            pass
        case ast.Name() | ast.Attribute():
            name, known = _name(node), _FUNCTIONS | (_METHODS if isinstance(node, ast.Attribute) else {})
            if name in known and isinstance(node.ctx, ast.Load):
                end = node.end_col_offset
                yield "another function", node.lineno, end - len(name), end, known[name]
        case ast.Slice():
            if node.lower:
                yield _whole("a slice that begins too late", node.lower, f"({_text(node.lower, lines)}) + 1")
            if node.upper:
                yield _whole("a slice that ends too early", node.upper, f"({_text(node.upper, lines)}) - 1")


def _between(node: ast.AST, lines: list[str]) -> Iterator[Edit]:
    """Rules for what may go over several lines, where what they change is in one."""
    match node:
        case ast.BinOp() if type(node.op) in _OPERATORS and not _joins(node):
            yield from _operator("another operator", node.left, node.right, *_OPERATORS[type(node.op)], lines)
        case ast.Compare(ops=[op]):
            yield from _operator("another comparison", node.left, node.comparators[0], *_COMPARISONS[type(op)], lines)
        case ast.BoolOp(values=[first, second, *_]):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _operator("and for or", first, second, *words, lines)
        case ast.AugAssign(op=ast.Add()) | ast.AugAssign(op=ast.Sub()):
            words = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            yield from _operator("another operator", node.target, node.value, *words, lines)
        case ast.If(test=test) | ast.IfExp(test=test) if test.lineno == test.end_lineno:
            yield _whole("a condition that is turned round", test, f"not ({_text(test, lines)})")
        case ast.Call():
            yield from _of_call(node, lines)
        case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=[first, second, *_])):
            yield from _swapped("two values swapped", first, second, lines)


def _joins(node: ast.BinOp) -> bool:
    """Whether it joins texts, lists or dicts: another operator would be refused at once."""
    kinds = (ast.Constant, ast.JoinedStr, ast.List, ast.Dict, ast.DictComp, ast.ListComp)
    return any(
        isinstance(x, kinds) and not isinstance(getattr(x, "value", ""), (int, float)) for x in (node.left, node.right)
    )


def _operator(rule: str, left: ast.AST, right: ast.AST, old: str, new: str, lines: list[str]) -> Iterator[Edit]:
    if left.end_lineno == right.lineno:
        gap = lines[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
        if old in gap:
            yield rule, right.lineno, left.end_col_offset, right.col_offset, gap.replace(old, new, 1)


def _of_call(node: ast.Call, lines: list[str]) -> Iterator[Edit]:
    given = [*node.args, *node.keywords]
    for before, keyword in zip([None, *given], given, strict=False):
        own_line = keyword.lineno == keyword.end_lineno
        if isinstance(keyword, ast.keyword) and own_line and keyword.arg and keyword.arg not in _NOT_DROPPED:
            start = before.end_col_offset if before and before.end_lineno == keyword.lineno else keyword.col_offset
            yield "an argument that is dropped", keyword.lineno, start, keyword.end_col_offset, ""
    for first, second in zip(node.args, node.args[1:], strict=False):
        is_plain = all(
            isinstance(x, (ast.Name, ast.Attribute)) for x in (first, second)
        )  # Others differ in type, mostly.
        if is_plain and _name(node.func) not in _NOT_SWAPPED:
            yield from _swapped("two arguments swapped", first, second, lines)


def _swapped(rule: str, first: ast.AST, second: ast.AST, lines: list[str]) -> Iterator[Edit]:
    if first.lineno == second.end_lineno:
        gap = lines[first.lineno - 1].encode()[first.end_col_offset : second.col_offset].decode()
        text = f"{_text(second, lines)}{gap}{_text(first, lines)}"
        yield rule, first.lineno, first.col_offset, second.end_col_offset, text
