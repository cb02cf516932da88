"""Checks of this house: floors, who may import what, sync points, headers of protocol files, nothing unpickled.

Each check takes the sources (module name -> text) and yields its findings, one line each. `python -m
shmkv_tools.checks` runs all of them over the installed package. Standard library only; nothing is imported to be read.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "shmkv"
FACE = "__init__"

FLOORS = {
    "errors": 0,
    "layout": 1,
    "segment": 2, "driver": 2,
    "sync": 3,
    "peers": 4, "namespace": 4,
    "signals": 5, "journal": 5, "entries": 5, "leases": 5, "arena": 5, "prefix": 5, "keys": 5, "descriptors": 5,
    "tensors": 6,
    "residue": 5, "regions": 5, "transport.foreign": 5, "transport.mailbox": 5,
    "tables": 6, "transport": 7,
    "eviction": 7, "recovery": 7, "news": 7, "starvation": 7,
    "transport.host": 8, "transport.cuda_ipc": 8, "transport.nccl": 8, "store": 8,
    "session": 9,
    "handles": 10, "keeper": 10, "fetch": 10, "openings": 10,
    "owned": 11,
    "devices": 12,
    "buffer": 13,
    "opening": 14,
    FACE: 15,
    "testing": 16, "why": 16, "inspector": 17,
}
"""A module imports only from floors below its own; adapters and kits live above the face."""

SIBLINGS: dict[tuple[str, str], str] = {}
"""(importer, imported): why this import may break the rule of the floors"""

PROTOCOLS = ("segment", "sync", "peers", "signals", "entries", "leases", "store", "recovery", "starvation", "residue",
             "regions", "transport.host", "transport.cuda_ipc", "transport.nccl", "transport.mailbox",
             "fetch", "inspector")
SECTIONS = ("What", "States", "Guarantees", "Not guaranteed", "If a party dies here", "Sync points", "Why not")

TORCH_USERS = ("tensors", "transport.*", "fetch", "owned", "devices", "vllm", "hf", "simple_buffer")
SYSTEM = {"os", "fcntl", "ctypes", "mmap", "posix_ipc", "signal", "socket", "select", "resource"}
SYSTEM_USERS = ("segment", "sync", "peers", "testing", "driver")
SYSTEM_EXCEPTIONS = {
    ("journal", "os.getpid"): "an event names its actor",
    ("transport.nccl", "os.environ"): "process groups read their options there",
    ("session", "os.getpid"): "a process registers its end once",
    ("inspector", "os"): "reads files without attaching to them",
    ("residue", "os"): "works on files without attaching to them",
    ("residue", "fcntl"): "takes the lock of a file without attaching to it",
}
"""(module, what it uses of the operating system): why"""

UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "numpy.load", "np.load"}
UNSAFE_USERS = ("testing",)


def check(texts: Mapping[str, str]) -> Iterator[str]:
    """All findings of all checks."""
    for one in (layers, torch_users, system_users, sync_points, headers, unsafe):
        yield from one(texts)


def sources(folder: Path | None = None) -> dict[str, str]:
    """The text of each module of the package, by its name in it ("transport.host"; the package itself is __init__)."""
    folder = folder or _folder_of(PACKAGE)
    texts = {}
    for path in sorted(folder.rglob("*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        texts[name.removesuffix(f".{FACE}")] = path.read_text()
    return texts


# ---------------------------------------------------------------- who imports whom

def layers(texts: Mapping[str, str], floors: Mapping[str, int] = FLOORS,
           exceptions: Mapping[tuple[str, str], str] = SIBLINGS) -> Iterator[str]:
    """Imports that do not go strictly downward, modules without a floor, floors and exceptions without a use."""
    used = set()
    for name, text in texts.items():
        if name not in floors:
            yield f"{name}: has no floor"
            continue
        for target, line in _imports(name, text, texts):
            if target == name or floors.get(target, -1) < floors[name]:
                continue
            if (name, target) in exceptions:
                used.add((name, target))
                continue
            yield f"{name}:{line}: imports {target} (floor {floors[target]}) from floor {floors[name]}"
    yield from (f"{name}: a floor without a module" for name in floors if name not in texts)
    yield from (f"{pair}: an exception that is not used" for pair in exceptions if pair not in used)


def torch_users(texts: Mapping[str, str], allowed: Iterable[str] = TORCH_USERS) -> Iterator[str]:
    """Modules that import torch at run time (not only for annotations) and should not."""
    for name, text in texts.items():
        if not _matches(name, allowed):
            yield from (f"{name}:{line}: imports torch" for module, line, for_types in _foreign(text)
                        if module.split(".")[0] == "torch" and not for_types)


def system_users(texts: Mapping[str, str], allowed: Iterable[str] = SYSTEM_USERS,
                 exceptions: Mapping[tuple[str, str], str] = SYSTEM_EXCEPTIONS) -> Iterator[str]:
    """Modules that speak to the operating system and should not; exceptions without a use."""
    used = set()
    for name, text in texts.items():
        if _matches(name, allowed):
            continue
        modules = {module.split(".")[0]: line for module, line, _ in _foreign(text)}
        for module, line in modules.items():
            if module not in SYSTEM:
                continue
            uses = {use for use, _ in _attributes(ast.parse(text)) if use.split(".")[0] == module} or {module}
            for use in sorted(uses):
                found = next((pair for pair in ((name, use), (name, module)) if pair in exceptions), None)
                used.add(found)
                if found is None:
                    yield f"{name}:{line}: uses {use}"
    yield from (f"{pair}: an exception that is not used" for pair in exceptions
                if pair not in used and pair[0] in texts)


def unsafe(texts: Mapping[str, str], allowed: Iterable[str] = UNSAFE_USERS) -> Iterator[str]:
    """Ways by which bytes could become code."""
    for name, text in texts.items():
        if _matches(name, allowed):
            continue
        for module, line, _ in _foreign(text):
            if module.split(".")[0] in UNSAFE_MODULES:
                yield f"{name}:{line}: imports {module}"
        for node in ast.walk(ast.parse(text)):
            called = _dotted(node.func) if isinstance(node, ast.Call) else ""
            if called in UNSAFE_CALLS:
                yield f"{name}:{node.lineno}: calls {called}"
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                yield f"{name}:{node.value.lineno}: passes allow_pickle"


# ---------------------------------------------------------------- what a protocol file says of itself

_LABEL = re.compile(r"#\s*SYNC POINT\b\s*(.*)")
_NAMED = re.compile(r"([a-z]+(?:-[a-z]+)*) \((store|load)\)")


def sync_points(texts: Mapping[str, str]) -> Iterator[str]:
    """Labels that do not stand at exactly one store and at least one load, in one file that lists them."""
    places: dict[str, list[tuple[str, str]]] = {}
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            for label in _LABEL.findall(line):
                named = _NAMED.fullmatch(label.strip())
                if named is None:
                    yield f"{name}:{number}: a sync point is named `label (store)` or `label (load)`, not {label!r}"
                else:
                    places.setdefault(named[1], []).append((name, named[2]))
    for label, found in sorted(places.items()):
        files = sorted({name for name, _ in found})
        stores, loads = (sum(kind == wanted for _, kind in found) for wanted in ("store", "load"))
        if stores != 1:
            yield f"{', '.join(files)}: sync point {label} stands at {stores} stores"
        if not loads:
            yield f"{', '.join(files)}: sync point {label} stands at no load"
        if len(files) > 1:
            yield f"{', '.join(files)}: sync point {label} stands in {len(files)} files"
    for name, text in texts.items():
        here = {label for label, found in places.items() if name in dict(found)}
        listed = _listed_points(text)
        yield from (f"{name}: sync point {label} is not listed in the header" for label in sorted(here - listed))
        yield from (f"{name}: the header lists sync point {label}, which stands nowhere" for label in
                    sorted(listed - here))


def headers(texts: Mapping[str, str], protocols: Iterable[str] = PROTOCOLS) -> Iterator[str]:
    """Protocol files whose header lacks a section, or has them in another order; files that claim to be one."""
    for name in protocols:
        if name not in texts:
            yield f"{name}: a protocol without a file"
            continue
        order = [section for section, _ in _sections(texts[name])]
        yield from (f"{name}: the header has no section {section!r}" for section in SECTIONS if section not in order)
        known = [section for section in order if section in SECTIONS]
        if known != sorted(known, key=SECTIONS.index):
            yield f"{name}: the header's sections stand in the order {', '.join(known)}"
    yield from (f"{name}: has the header of a protocol and is not listed as one" for name, text in texts.items()
                if name not in protocols and dict(_sections(text)).get("What"))


def _sections(text: str) -> list[tuple[str, str]]:
    """(name, text) of each section of a module's docstring: a paragraph that starts with its name."""
    found = []
    for paragraph in (ast.get_docstring(ast.parse(text)) or "").split("\n\n"):
        for section in SECTIONS:  # "Why not" goes on with the alternative
            if re.match(r"Why not\b" if section == "Why not" else f"{section}:", paragraph):
                found.append((section, paragraph.partition(":")[2]))
    return found


def _listed_points(text: str) -> set[str]:
    points = dict(_sections(text)).get("Sync points", "none").strip()
    return set() if points.startswith("none") else set(re.findall(r"[a-z]+(?:-[a-z]+)*", points))


# ---------------------------------------------------------------- reading sources

def _imports(name: str, text: str, texts: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """(module of this package, line) of every import in a module, also those inside functions and for annotations."""
    package = "" if name == FACE else name if _is_package(name, texts) else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield _module(alias.name.partition(".")[2], texts), node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".") if package else []
                base = ".".join([*parts[:len(parts) - node.level + 1], *base.split(".")]).strip(".")
            elif base.split(".")[0] == PACKAGE:
                base = base.partition(".")[2]
            else:
                continue
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                yield (inner if inner in texts else _module(base, texts)), node.lineno


def _is_package(name: str, texts: Mapping[str, str]) -> bool:
    return any(other.startswith(f"{name}.") for other in texts)


def _module(name: str, texts: Mapping[str, str]) -> str:
    while name and name not in texts:
        name = name.rpartition(".")[0]
    return name or FACE


def _foreign(text: str) -> Iterator[tuple[str, int, bool]]:
    """(module, line, whether for annotations only) of every absolute import."""
    tree = ast.parse(text)
    for_types = {inner for node in ast.walk(tree) if isinstance(node, ast.If) and _dotted(node.test) in
                 ("TYPE_CHECKING", "typing.TYPE_CHECKING") for branch in node.body for inner in ast.walk(branch)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node in for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module, node.lineno, node in for_types


def _attributes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node.lineno


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _matches(name: str, allowed: Iterable[str]) -> bool:
    return any(name == one or one.endswith(".*") and name.startswith(one[:-1]) for one in allowed)


def _folder_of(package: str) -> Path:
    found = find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(package)
    return Path(found.origin).parent


def main() -> int:
    findings = list(check(sources()))
    print("\n".join(findings) or "the house is in order")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
