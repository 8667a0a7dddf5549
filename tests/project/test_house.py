"""The house rules that a machine can check: imports, dependencies, sizes, words and docstrings."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rows import for_each

from cloudtrain.validate import toml_loads

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cloudtrain"
FUNCTION_LINES = 60

#: The rooms of the house, lowest first: each may import from the rows above its own, wherever in its code the statement
#: stands (in a function and under TYPE_CHECKING too: a name that a module must know is a dependency).
#: Some import by a name in a text: `provider_api.registry` a provider, `runs` the pages about a run and a sweep, and
#: `providers._cloud` the modules of a provider's folder.
ORDER: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "_version errors schemas",
        "validate",
        "storage",
        "job",
        "provider_api",
        "settings",
        "runtime",
        "store",
        "runs",
        "engine",
        "report doctor providers",
        "estimator",
        "cli compat testing",
        "__main__",
    )
)
#: Stricter than the order: the only packages that these may import.
ONLY: dict[str, frozenset[str]] = {
    "runtime": frozenset({"errors", "validate", "provider_api"}),
    "providers": frozenset({"errors", "validate", "storage", "job", "provider_api", "runtime"}),
}
#: Providers whose nodes run on this machine. A name with an underscore has no extra: users cannot choose it.
WITH_ENGINE = frozenset({"local", "docker", "_rehearsal"})
#: Imported as something else than the distribution is called.
DISTRIBUTIONS = {"tomli_w": "tomli-w"}
#: Packages that an extra installs: transfers, the clouds' credentials, a sampler.
BROUGHT = {name: name for name in ("obstore", "optuna", "torchx")} | {"botocore": "boto3", "azure": "azure-identity"}
PROVIDERS = {path.stem for path in (PACKAGE / "providers").iterdir() if not path.stem.startswith("_")}


# ------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Import:
    """``module`` is absolute, ``ours`` its part below cloudtrain (empty: another package); ``top``: at import time."""

    where: str
    module: str
    top: bool
    inside: tuple[str, ...]

    @property
    def ours(self) -> str:
        return self.module.partition(".")[2].partition(".")[0] if self.package == "cloudtrain" else ""

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


def home(path: Path) -> str:
    """Return the room that a file belongs to: its folder, or the module itself; empty for the package's __init__."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Return every import statement of a file, also those in functions and under TYPE_CHECKING."""
    package = ("cloudtrain", *path.relative_to(PACKAGE).parent.parts)
    found: list[Import] = []

    def visit(node: ast.AST, inside: tuple[str, ...], top: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = ".".join([*package[: len(package) + 1 - child.level], *filter(None, [child.module])])
                base = base if child.level else str(child.module)
                # `from . import x` names a module in its list
                names = [f"{base}.{a.name}" for a in child.names] if child.level and not child.module else [base]
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                deeper = (*inside, child.name) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else inside
                visit(child, deeper, top and not function and not _type_checking(child))
                continue
            where = f"{name_of(path)}:{child.lineno}"
            found.extend(Import(where, name, top, inside) for name in names)

    visit(parsed(path), (), True)
    return tuple(found)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def third_party(item: Import) -> bool:
    return item.package != "cloudtrain" and item.package not in sys.stdlib_module_names


def level(name: str) -> int:
    """Return the module's row in ORDER. A module without one fails its own test and counts as the top."""
    return next((number for number, row in enumerate(ORDER) if name in row), len(ORDER))


# ------------------------------------------------------------------------------------------------------------- imports


def test_every_module_has_its_place_in_the_order() -> None:
    modules = {home(path) for path in sources()} - {""}
    assert modules <= frozenset().union(*ORDER), "say in ORDER where the new module stands"


def test_the_design_page_draws_the_same_order() -> None:
    picture = (ROOT / "docs" / "design.md").read_text().partition("Lowest first:")[2].split("```")[1]
    floors = [re.findall(r"(?m)^[ \d]{3}(\w+)", floor) for floor in re.split(r"(?m)^(?=[ \d]\d )", picture)[1:]]
    assert [frozenset(floor) for floor in floors] == list(ORDER)


@pytest.mark.slow
def test_imports_go_one_way() -> None:
    wrong = []
    for path in sources():
        here = home(path)
        for item in imports(path):
            if item.package != "cloudtrain" or here in ("", item.ours):
                continue
            if not item.ours or level(item.ours) >= level(here):
                wrong.append(f"{item.where}: {here} must not import {item.module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.costly
def test_the_node_side_and_providers_need_little_of_ours() -> None:
    wrong = []
    for path in sources():
        here = home(path)
        for item in imports(path):
            if item.package != "cloudtrain" or here not in ONLY or item.ours in (here, "_version"):
                continue
            allowed = ONLY[here] | ({"engine"} if _provider(path) in WITH_ENGINE else frozenset())
            if item.ours not in allowed:
                wrong.append(f"{item.where}: imports {item.module}")
    assert not wrong, "\n".join(wrong)


def test_no_provider_imports_another() -> None:
    """All may import `_cloud`, which names no provider."""
    wrong = [
        f"{item.where}: imports {item.module}"
        for path in sources(PACKAGE / "providers")
        for item in imports(path)
        if item.ours == "providers" and item.module.split(".")[2:3] not in ([], ["_cloud"], [_provider(path)])
    ]
    assert not wrong, "\n".join(wrong)


def _provider(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[1] if parts[0] == "providers" and len(parts) > 1 else ""


def test_importing_the_package_needs_the_standard_library_alone() -> None:
    wrong = [
        f"{item.where}: imports {item.module}"
        for path in sources()
        if home(path) not in ("cli", "testing")
        for item in imports(path)
        if third_party(item) and item.top
    ]
    assert not wrong, "\n".join(wrong)


def test_what_runs_on_a_node_never_imports_anything_else() -> None:
    wrong = [
        f"{item.where}: imports {item.module}"
        for path in sources()
        for item in imports(path)
        if third_party(item)
        and (home(path) == "runtime" or (_provider(path) and (item.top or "node_environment" in item.inside)))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_worker_is_one_file_of_the_standard_library() -> None:
    """The node copies it into scratch and starts it alone."""
    found = {item.package for item in imports(PACKAGE / "runtime" / "worker.py")}
    assert found <= {*sys.stdlib_module_names, "_signal"}, found


def fresh(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_cloudtrain_loads_little() -> None:
    code = "import sys; old = set(sys.modules); import cloudtrain; print(*sorted(set(sys.modules) - old))"
    loaded = fresh(code).split()
    ours = [name for name in loaded if name.split(".")[0] == "cloudtrain"]
    assert len(ours) < 10, ours
    others = {name.split(".")[0] for name in loaded} - {"cloudtrain"}
    assert others <= sys.stdlib_module_names, others - sys.stdlib_module_names


def test_a_remote_store_loads_no_client_before_it_is_used() -> None:
    loaded = fresh("import sys, cloudtrain.storage.remote; print(*sys.modules)").split()
    assert not {"botocore", "fsspec", "importlib.metadata", "obstore", "urllib.request"} & set(loaded)


@pytest.mark.slow
def test_all_of_it_can_be_imported_where_nothing_is_installed() -> None:
    """With -S Python ignores site-packages, as in an image without cloudtrain's packages."""
    names = [
        ".".join(("cloudtrain", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
        for path in sources()
        if home(path) not in ("cli", "testing", "__main__")
    ]
    lines = [f"import sys; sys.path.insert(0, {str(ROOT)!r})", *[f"import {name}" for name in names]]
    assert fresh("\n".join(lines), "-S", "-E") == ""


# ---------------------------------------------------------------------------------------------------- providers' names


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every text constant and identifier of the code with its line, but no docstring."""
    docs = set()
    for node in nodes(path):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docs.add(id(statement.value))
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr


@pytest.mark.costly
def test_only_a_provider_itself_says_its_name() -> None:
    """`local` and `docker` are common words. `compat` is about the SDK of one platform."""
    clouds = re.compile("|".join(PROVIDERS - {"local", "docker"}), re.IGNORECASE)
    wrong = [
        f"{name_of(path)}:{line}: {text!r}"
        for path in sources()
        if home(path) not in ("providers", "testing", "compat")
        for line, text in literals(path)
        if clouds.search(text)
    ]
    assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------------------------------------------------- the clouds

#: The files of every cloud's folder, and the names that each of them has.
CLOUD_FILES: dict[str, str] = {
    "__init__": "ALIASES DIFFERENCES NAME Provider SAMPLE Settings",
    "request": "OWNED checked plan",
    "validate": "check_body",
    "api": "Account FINAL HELP error_of job_of",
    "status": "HINTS PENDING category_of status status_of",
    "logs": "page",
    "launch_spec": "launch_spec",
    "node": "GRACE node_environment secret",
    "doctor": "checks",
}
#: Files for a feature that only one cloud has.
CLOUD_EXTRAS = {
    "modelarts": {"signing"},
    "sagemaker": {"images", "s3"},
    "azureml": {"sdk", "urls"},
    "vertex": {"machines", "bootstrap", "prepare"},
    "slurm": {"script"},
    "kubernetes": {"devices", "shell"},
}


@for_each("cloud", sorted(CLOUD_EXTRAS))
def test_the_clouds_have_the_same_files_and_names(cloud: str) -> None:
    """A function has the same name in the same file of each cloud."""
    folder = PACKAGE / "providers" / cloud
    assert {path.stem for path in sources(folder)} == CLOUD_FILES.keys() | CLOUD_EXTRAS[cloud]
    for file, names in CLOUD_FILES.items():
        body = parsed(folder / f"{file}.py").body
        targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
        there = {getattr(node, "name", "") for node in body} | {part.id for t in targets for part in _names(t)}
        assert set(names.split()) <= there, file
    account = next(node for node in parsed(folder / "api.py").body if getattr(node, "name", "") == "Account")
    methods = {getattr(node, "name", "") for node in account.body}  # type: ignore[attr-defined]
    assert methods >= {"__init__", "create", "find", "describe", "cancel", "principal"}


def _names(target: ast.expr) -> list[ast.Name]:
    return [node for node in ast.walk(target) if isinstance(node, ast.Name)]


# --------------------------------------------------------------------------------------------------- nothing unfinished


@cache
def comments(path: Path) -> tuple[tuple[int, str], ...]:
    with tokenize.open(path) as stream:
        tokens = tokenize.generate_tokens(stream.readline)
        return tuple((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)


def shipped(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders or ("cloudtrain", "entrypoints", "examples", "benchmarks")
        for path in sources(ROOT / folder)
    ]


@pytest.mark.slow
def test_nothing_is_left_for_later() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [f"{name_of(p)}:{line}: {text}" for p in shipped() for line, text in comments(p) if marks.search(text)]
    for path in shipped():
        for node in nodes(path):
            if isinstance(node, ast.Name) and node.id == "NotImplementedError":
                found.append(f"{name_of(path)}:{node.lineno}: NotImplementedError")
    assert not found, "\n".join(found)


def test_benchmarks_import_names_that_exist() -> None:
    """Their programs are texts, which neither mypy nor ruff reads."""
    programs = 0
    for path in sources(ROOT / "benchmarks"):
        texts = [node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        trees = [ast.parse(text) for text in texts if text.startswith("\n") and "cloudtrain" in text]
        programs += len(trees)
        for node in (node for tree in (parsed(path), *trees) for node in ast.walk(tree)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "cloudtrain":
                for name in (name.name for name in node.names):
                    found = hasattr(importlib.import_module(str(node.module)), name)
                    assert found or find_spec(f"{node.module}.{name}"), f"{name_of(path)}: no {node.module}.{name}"
    assert programs


@pytest.mark.costly
def test_no_function_is_a_stub() -> None:
    """A function without an effect must state the reason in its docstring."""
    found = []
    for path in shipped():
        protocols = {
            id(method)
            for kind in nodes(path)
            if isinstance(kind, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in kind.bases)
            for method in kind.body
        }
        for node in functions(path):
            abstract = id(node) in protocols or any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)
            if not abstract and not ast.get_docstring(node) and not any(map(_does, node.body)):
                found.append(f"{name_of(path)}:{node.lineno}: {node.name}")
    assert not found, "\n".join(found)


def _does(statement: ast.stmt) -> bool:
    text_or_dots = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return not (text_or_dots or isinstance(statement, ast.Pass))


@pytest.mark.costly
def test_a_broad_except_says_why() -> None:
    wrong = []
    for path in shipped():
        said = dict(comments(path))
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler) and _broad(node) and not _reraises(node):
                reason = re.sub(r"#\s*(noqa(: *[A-Z0-9, ]+)?)?", "", said.get(node.lineno, "")).strip(" -")
                if len(reason.split()) < 3:
                    wrong.append(f"{name_of(path)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def _broad(node: ast.ExceptHandler) -> bool:
    kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
    return any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds)


def _reraises(node: ast.ExceptHandler) -> bool:
    return isinstance(node.body[-1], ast.Raise)


# ------------------------------------------------------------------------------------------------- sizes and docstrings


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> list[Function]:
    return [node for node in nodes(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def test_functions_are_short() -> None:
    """Functions of entry points may be long, so that a training script reads from top to bottom."""
    long = [
        f"{name_of(path)}:{node.lineno}: {node.name}, {length} lines"
        for path in shipped("cloudtrain", "benchmarks")
        for node in functions(path)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def test_everything_public_says_what_it_is() -> None:
    silent = []
    for path in sources():
        tree = parsed(path)
        if not ast.get_docstring(tree):
            silent.append(f"{name_of(path)}: the module")
        silent += [
            f"{name_of(path)}:{node.lineno}: {node.name}"
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and node.name in _public(tree)
            and not ast.get_docstring(node)
        ]
    assert not silent, "\n".join(silent)


def test_a_public_name_stands_in_one_module() -> None:
    """Providers are alike on purpose. ``main`` is the name of a program's entry."""
    homes: dict[str, list[str]] = {}
    for path in sources():
        if home(path) in ("providers", "testing", "cli", "compat") or path.stem in ("__main__", "worker"):
            continue
        for node in parsed(path).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith(("_", "main")):
                homes.setdefault(node.name, []).append(name_of(path))
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, twice


def _public(tree: ast.Module) -> set[str]:
    """Return ``__all__``, or without it every name that does not begin with an underscore."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    names = {getattr(node, "name", "_") for node in tree.body}
    return {name for name in names if not name.startswith("_")}


# ---------------------------------------------------------------------------------------------------------- plain words


#: Words that no message, hint or help text may have (STYLE: name the actor; a region or provider is not a place).
BANNED = re.compile(
    r"\b(told|tells?|said|nobody|somebody|whoever|anew|beside|goes on|going on|went on|places?)\b", re.I
)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield every text of three words or more with its line, with `…` for placeholders, but no docstring or program."""
    docs, inner = set[int](), set[int]()
    for node in nodes(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
    for node in nodes(path):
        if id(node) in docs | inner:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(re.findall(r"[a-z]{2,}", text)) >= 3 and " " in text and "import " not in text:
            yield node.lineno, text


@pytest.mark.costly
def test_messages_are_in_plain_words() -> None:
    found = [
        f"{name_of(path)}:{line}: {text}"
        for path in sources()
        if home(path) != "testing"
        for line, text in messages(path)
        if BANNED.search(text)
    ]
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------------------ packaging


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return toml_loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"), where="pyproject.toml")


def requirement(text: str) -> str:
    return re.match(r"[A-Za-z0-9_.-]+", text)[0]  # type: ignore[index]


def test_one_python_floor(project: dict[str, Any]) -> None:
    floor = re.fullmatch(r">=(\d+)\.(\d+)", project["project"]["requires-python"])
    assert floor is not None
    major, minor = floor.groups()
    tool = project["tool"]
    assert tool["ruff"]["target-version"] == f"py{major}{minor}"
    assert tool["mypy"]["python_version"] == f"{major}.{minor}"
    assert f"--target={major}.{minor}-" in (ROOT / "Makefile").read_text()
    assert f"Python {major}.{minor} or later" in (ROOT / "README.md").read_text()


def test_dependencies_are_those_that_are_imported(project: dict[str, Any]) -> None:
    declared = {requirement(text) for text in project["project"]["dependencies"]}
    used = {
        DISTRIBUTIONS.get(item.package, item.package)
        for path in sources()
        if home(path) not in ("providers", "testing", "engine")
        for item in imports(path)
        if third_party(item) and item.package != "_signal"
    }
    assert used == declared | set(BROUGHT)
    extras = {requirement(text) for some in project["project"]["optional-dependencies"].values() for text in some}
    assert extras >= set(BROUGHT.values())


def test_an_engine_needs_what_the_extra_of_its_provider_brings(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    brought = {requirement(text) for name in WITH_ENGINE & PROVIDERS for text in extras[name]}
    assert {item.package for path in sources(PACKAGE / "engine") for item in imports(path) if third_party(item)} == (
        brought - {"torch", "numpy", "cloudtrain"}
    )


def test_every_provider_has_its_extra(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    assert set(extras) >= PROVIDERS | {"dev"}
    assert any(requirement(text) == "torch" for text in extras["local"])


def test_the_package_is_typed_and_has_one_console_script(project: dict[str, Any]) -> None:
    assert (PACKAGE / "py.typed").exists()
    assert project["project"]["scripts"] == {"cloudtrain": "cloudtrain.cli:main"}


def test_a_new_machine_takes_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## Two commands on a new machine")[2].partition("\n## ")[0]
    block = section.partition("```sh\n")[2].partition("```")[0]
    assert [line.split("#")[0].split() for line in block.splitlines()] == [["make", "demo"], ["make", "test"]]
