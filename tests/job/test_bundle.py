"""The bundle: the files that ship from real trees, with git and without it, and the refused ones."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from cloudtrain.errors import DigestError, SpecError, StorageError
from cloudtrain.job.bundle import MANIFEST, Bundle, build_bundle
from cloudtrain.job.entry_point import check_script, resolve
from cloudtrain.job.job import Source
from cloudtrain.runtime.unpack import unpack

ENTRY = "train.py"


@pytest.fixture(autouse=True)
def _own_git_settings(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    (home / ".gitconfig").write_text(
        '[user]\nname = a\nemail = a@example.com\n[init]\ndefaultBranch = main\n[protocol "file"]\nallow = always\n'
    )


def git(folder: Path | str, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def files(root: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in {ENTRY: "print()\n", **texts}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return root


def repository(root: Path, texts: dict[str, str | bytes]) -> Path:
    files(root, texts)
    git(root, "init", "-q")
    return root


def bundle(
    root: Path, *, git: bool = True, never: tuple[Path, ...] = (), max_bytes: int = 2**20, **source: object
) -> Bundle:
    values = {"entry_point": ENTRY, **source}
    return build_bundle(Source(**values), cwd=root, git=git, never=never, max_bytes=max_bytes)  # type: ignore[arg-type]


def paths(made: Bundle) -> list[str]:
    return [file.path for file in made.files]


def rules(made: Bundle) -> dict[str, str]:
    return {item.path: item.rule for item in made.excluded}


def refused(root: Path, **options: object) -> SpecError:
    with pytest.raises(SpecError) as caught:
        bundle(root, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return caught.value


# ------------------------------------------------------------------------------------------------ root and entry point


@pytest.mark.parametrize(
    ("cwd", "path", "entry", "expected"),
    [
        (".", None, "sub/train.py", (".", "sub/train.py")),
        (".", None, "./sub/../sub/train.py", (".", "sub/train.py")),
        ("sub", None, "train.py", ("sub", "train.py")),
        ("other", None, "../sub/train.py", ("sub", "train.py")),
        ("other", None, "{top}/sub/train.py", ("sub", "train.py")),
        (".", "sub", "train.py", ("sub", "train.py")),
        (".", "sub", "sub/train.py", ("sub", "train.py")),
        (".", "{top}/sub", "{top}/sub/train.py", ("sub", "train.py")),
        (".", "sub", "-m pkg.mod", ("sub", "-m pkg.mod")),
        ("sub", None, "-m pkg.mod", ("sub", "-m pkg.mod")),
        ("sub", None, "-m pkg", ("sub", "-m pkg")),
        ("other", None, "", ("other", "")),
    ],
)
def test_root_and_entry_point(
    tmp_path: Path, cwd: str, path: str | None, entry: str, expected: tuple[str, str]
) -> None:
    files(tmp_path, {"sub/train.py": "", "sub/pkg/mod.py": "", "sub/pkg/__main__.py": "", "other/x": ""})
    path = path and path.format(top=tmp_path)
    source = Source(path=path, entry_point=entry.format(top=tmp_path))
    assert resolve(source, cwd=tmp_path / cwd) == (Path(os.path.realpath(tmp_path / expected[0])), expected[1])


@pytest.mark.parametrize(
    ("source", "field", "hint"),
    [
        ({"entry_point": "trian.py"}, "source.entry_point", "did you mean 'train.py'"),
        ({"entry_point": "sub"}, "source.entry_point", "is a folder"),
        ({"entry_point": "train.py", "path": "sbu"}, "source.path", "did you mean 'sub'"),
        ({"entry_point": "train.py", "path": "sub"}, "source.entry_point", "outside"),
        ({"entry_point": "-m pkg.mod"}, "source.entry_point", "no module pkg.mod"),
        ({"entry_point": "train.py", "requirements": "req.txt"}, "source.requirements", "does not exist"),
        ({"entry_point": "train.py", "dependencies": ("sub", "nope")}, "source.dependencies[1]", "not a folder"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, source: dict[str, object], field: str, hint: str) -> None:
    files(tmp_path, {"sub/x.py": ""})
    error = refused(tmp_path, **source) if "dependencies" not in source else None
    if error is None:
        files(tmp_path / "code", {})
        error = refused(tmp_path / "code", **{**source, "dependencies": ("../sub", "../nope")})
    assert error.field == field
    assert hint in f"{error}; {error.hint}"


def test_a_script_that_does_not_ship_is_refused_with_its_rule(tmp_path: Path) -> None:
    repository(tmp_path, {".gitignore": "train*\n"})
    for use_git in (True, False):
        error = refused(tmp_path, git=use_git)
        assert error.field == "source.entry_point"
        assert ".gitignore:1:train*" in str(error)
    (tmp_path / ".cloudtrainignore").write_text("!/train.py\n")
    assert ENTRY in paths(bundle(tmp_path))


# ------------------------------------------------------------------------------------------------------------------ git


def test_the_tree_is_the_one_git_sees(tmp_path: Path) -> None:
    repository(tmp_path, {".gitignore": "*.log\ndata/\n!keep.log\n", "a.log": "", "kept.log": "t", "gone.py": ""})
    files(tmp_path, {"data/x": "", "sub/.gitignore": "/y\n!z.log\n", "sub/y": "", "sub/z.log": "", "sub/deep/y": ""})
    git(tmp_path, "add", "-f", "kept.log", "gone.py", ENTRY)
    git(tmp_path, "commit", "-qm", "x")
    (tmp_path / "gone.py").unlink()
    (tmp_path / ENTRY).write_text("changed\n")
    made = bundle(tmp_path)
    assert paths(made) == [".gitignore", "kept.log", "sub/.gitignore", "sub/deep/y", "sub/z.log", ENTRY]
    assert rules(made) == {
        ".git/": "built-in: .git",
        "a.log": ".gitignore:1:*.log",
        "data/": ".gitignore:2:data/",
        "sub/y": "sub/.gitignore:1:/y",
    }
    changed = hashlib.sha256(b"changed\n").hexdigest()
    assert [file.sha256 for file in made.files if file.path == ENTRY] == [changed]


def test_excludes_beside_the_tree_count(tmp_path: Path) -> None:
    repository(tmp_path, {"one": "", "two": "", "sub/three": ""})
    (tmp_path / ".git/info/exclude").write_text("one\n")
    everywhere = Path(os.environ["HOME"]) / "ignored"
    everywhere.write_text("two\nsub/\n")
    git(tmp_path, "config", "--global", "core.excludesFile", str(everywhere))
    made = bundle(tmp_path)
    assert paths(made) == [ENTRY]
    assert rules(made)["one"] == ".git/info/exclude:1:one"
    assert rules(made)["two"] == f"{everywhere}:1:two"
    assert "one" not in paths(bundle(tmp_path, git=False))


def test_rules_from_above_the_root_count(tmp_path: Path) -> None:
    repository(tmp_path, {".gitignore": "*.bin\n/code/skip\n"})
    files(tmp_path / "code", {"a.bin": "", "skip": "", "b": ""})
    for use_git in (True, False):
        made = bundle(tmp_path / "code", git=use_git)
        assert paths(made) == ["b", ENTRY]
        assert rules(made) == {"a.bin": ".gitignore:1:*.bin", "skip": ".gitignore:2:/code/skip"}


def test_a_root_that_git_ignores_ships_by_its_own_rules(tmp_path: Path) -> None:
    repository(tmp_path, {".gitignore": "*\n"})
    files(tmp_path / "out/code", {".gitignore": "b\n", "a": "", "b": ""})
    for use_git in (True, False):
        made = bundle(tmp_path / "out/code", git=use_git)
        assert paths(made) == [".gitignore", "a", ENTRY]
    assert "git ignores" in bundle(tmp_path / "out/code").warnings[0]


def test_submodules_and_repositories_inside_ship(tmp_path: Path) -> None:
    repository(tmp_path / "lib", {".gitignore": "*.o\n", "x.py": "", "kept.o": ""})
    git(tmp_path / "lib", "add", "-f", ".")
    git(tmp_path / "lib", "commit", "-qm", "x")
    main = repository(tmp_path / "main", {".gitignore": "*.py\n!train.py\n"})
    git(main, "submodule", "--quiet", "add", str(tmp_path / "lib"), "third/lib")
    repository(main / "clone", {"y.py": "", "z.o": ""})
    (main / "third/lib/built.o").write_text("")
    made = bundle(main)
    inside = [f"third/lib/{name}" for name in (".gitignore", "kept.o", ENTRY, "x.py")]
    assert paths(made) == [".gitignore", ".gitmodules", f"clone/{ENTRY}", "clone/y.py", "clone/z.o", *inside, ENTRY]
    assert rules(made)["third/lib/built.o"] == ".gitignore:1:*.o"
    git(main, "submodule", "--quiet", "deinit", "-f", "third/lib")
    assert "third/lib/ is not checked out" in bundle(main).warnings[0]


def test_the_commit_is_recorded(tmp_path: Path) -> None:
    repository(tmp_path, {})
    assert bundle(tmp_path).git == {"commit": None, "branch": "main", "dirty": True}
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    assert bundle(tmp_path).git == {"commit": head, "branch": "main", "dirty": False}
    git(tmp_path, "mv", ENTRY, "b.py")
    git(tmp_path, "checkout", "-q", "--detach")
    assert bundle(tmp_path, entry_point="b.py").git == {"commit": head, "branch": None, "dirty": True}
    assert bundle(tmp_path, entry_point="b.py", git=False).git is None


def test_broken_or_absent_git_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path, {".gitignore": "a\n", "a": "", "b": ""})
    expected = bundle(tmp_path)
    others = []
    if os.geteuid() == 0:  # git trusts no repository of another user
        os.chown(tmp_path, 12345, 12345)
        others.append(bundle(tmp_path))
        os.chown(tmp_path, 0, 0)
        assert "dubious ownership" in others[0].warnings[0]
    (tmp_path / ".git/config").write_text("[core\n")
    others.append(bundle(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    for made in (*others, bundle(tmp_path)):
        assert (made.digest, made.excluded, made.git) == (expected.digest, expected.excluded, None)
        assert "git did not answer" in made.warnings[0]


def test_a_repository_in_the_environment_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository(tmp_path / "other", {})
    repository(tmp_path / "code", {".gitignore": "a\n", "a": ""})
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "none"))
    assert paths(bundle(tmp_path / "code")) == [".gitignore", ENTRY]


NAMES = st.sampled_from(
    ["a", "b", "ab", "foo", "x.py", "fo]", "[a", "é", " s", "s ", "-", "a\\b", "#c", "!d", "foo\nbar", "A1"]
)
PIECES = ["*", "**", "?", "a", "b", "foo", "x", ".py", "[ab]", "[!a]", "[^b-z]", "[]-a]", "[[:alpha:]]", "[[:upper:]x]"]
PIECES += ["\\", "é", " ", "[", "[a", "-", "\\*", "\\ ", "[\\]]", "[a-]", "[[:no:]]", "#", "!", "\t", "***", "[a/]"]
SEGMENT = st.one_of(
    st.sampled_from(["*", "**", "a", "b", "foo", "*.py", "a*"]),
    st.lists(st.sampled_from(PIECES), max_size=3).map("".join),
)


PATTERN = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(SEGMENT, min_size=1, max_size=3).map("/".join),
    st.sampled_from(["", "", "/", " ", "\r"]),
)
PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), min_size=1, max_size=12)
IGNORES = st.dictionaries(
    st.sampled_from(["", "a/", "b/", "a/b/", "foo/"]), st.lists(PATTERN, min_size=1, max_size=4), max_size=3
)


def random_tree(root: Path, names: list[str], ignores: dict[str, list[str]]) -> None:
    for name in names:
        try:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        except OSError:
            continue
    for folder, lines in ignores.items():
        if (root / folder).is_dir():
            (root / folder / ".gitignore").write_bytes("\n".join(lines).encode())


@pytest.mark.costly
@given(names=PATHS, ignores=IGNORES, exclude=st.lists(PATTERN, max_size=2))
@settings(max_examples=examples(int(os.environ.get("CLOUDTRAIN_EXAMPLES", "150"))), deadline=None)
def test_in_a_checkout_git_s_own_list_ships(
    names: list[str], ignores: dict[str, list[str]], exclude: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        git(root, "init", "-q", "--template=")
        (root / ".git/info").mkdir(exist_ok=True)
        (root / ".git/info/exclude").write_bytes("\n".join(exclude).encode())
        random_tree(root, names, ignores)
        listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]
        source = Source(entry_point="", path=folder)
        assert paths(build_bundle(source, cwd=root)) == sorted(listed)
        build_bundle(source, cwd=root, git=False)  # no pattern stops the walk


@pytest.mark.parametrize(
    "ignores",
    [
        {"": "*.log\n!keep.log\n# a comment\n\n\\#file\n"},
        {"": "*\n!*/\n!*.py\n!.gitignore\n"},
        {"": "/*\n!/src/\n!/train.py\n"},
        {"": "*\n!/src\n!/src/**\n"},
        {"": "data/\n!data/keep.log\n"},
        {"": "src/data/**\n!src/data/keep.log\n"},
        {"": "src/*\n!src/data\n"},
        {"": "**/data\nx.p?\n[a-k]eep.log  \n"},
        {"": "*.log\r\n/data\r\n"},
        {"": "*.log\n", "src/": "!keep.log\n/x.py\n", "src/data/": "*\n"},
        {"": "[z-a]\n!\n/\n//\n"},
    ],
)
def test_without_git_the_usual_rules_leave_out_the_same(tmp_path: Path, ignores: dict[str, str]) -> None:
    tree = ("a.log", "keep.log", "#file", "data/x", "data/keep.log", "src/x.py", "src/keep.log", "src/data/keep.log")
    repository(tmp_path, {**dict.fromkeys(tree, ""), **{f"{at}.gitignore": text for at, text in ignores.items()}})
    asked, read = (bundle(tmp_path, entry_point="", git=use_git) for use_git in (True, False))
    assert (paths(read), read.excluded, read.digest) == (paths(asked), asked.excluded, asked.digest)


def test_a_folder_brought_back_names_no_secret_in_it(tmp_path: Path) -> None:
    files(tmp_path, {".cloudtrainignore": "!/config/\n!secrets\n", "config/.env": "", "secrets/id_rsa": ""})
    assert "config/.env, secrets/id_rsa" in str(refused(tmp_path))


# ------------------------------------------------------------------------------------------------------- our own rules


@pytest.mark.parametrize("use_git", [True, False])
def test_cloudtrainignore_decides_over_git(tmp_path: Path, use_git: bool) -> None:
    repository(
        tmp_path,
        {
            ".gitignore": "data/\n*.bin\nout/\n",
            ".cloudtrainignore": "docs/\n*.tmp\n!/data/vocab.json\n!out/\n",
            "docs/a": "",
            "sub/.cloudtrainignore": "!a.tmp\n/b\n",
            **dict.fromkeys(("sub/a.tmp", "sub/b", "b", "c.tmp", "data/vocab.json", "data/big", "data/deep/x"), ""),
            **dict.fromkeys(("out/a.bin", "out/b", "w.bin"), ""),
        },
    )
    git(tmp_path, "add", "-f", "docs/a", "c.tmp")
    made = bundle(tmp_path, git=use_git, exclude=("/b", "out/b"))
    ours = [path for path in paths(made) if not path.endswith("ignore")]
    assert ours == ["data/vocab.json", "out/a.bin", "sub/a.tmp", ENTRY]
    assert rules(made) == {
        ".git/": "built-in: .git",
        "b": "source.exclude[0]:/b",
        "c.tmp": ".cloudtrainignore:2:*.tmp",
        "data/big": ".gitignore:1:data/",
        "data/deep/": ".gitignore:1:data/",
        "docs/": ".cloudtrainignore:1:docs/",
        "out/b": "source.exclude[1]:out/b",
        "sub/b": "sub/.cloudtrainignore:2:/b",
        "w.bin": ".gitignore:2:*.bin",
    }


@pytest.mark.parametrize("line", ["!data/a/b", "!/data/*/b", "!**/b", "!data/**/b"])
def test_a_path_brought_back_opens_the_folders_above_it(tmp_path: Path, line: str) -> None:
    repository(tmp_path, {".gitignore": "/data\n", ".cloudtrainignore": line, "data/a/b": "", "data/c": ""})
    for use_git in (True, False):
        assert [path for path in paths(bundle(tmp_path, git=use_git)) if "/" in path] == ["data/a/b"]


def test_a_mere_name_does_not_open_folders(tmp_path: Path) -> None:
    repository(tmp_path, {".gitignore": "/data\n", ".cloudtrainignore": "!b\n", "data/b": "", "b": ""})
    assert rules(bundle(tmp_path))["data/"] == ".gitignore:1:/data"


@pytest.mark.parametrize("use_git", [True, False])
def test_what_never_ships(tmp_path: Path, use_git: bool) -> None:
    junk = ["a/__pycache__/x.py", "node_modules/x", ".mypy_cache/x", "a/b.pyc", ".DS_Store", ".ipynb_checkpoints/x"]
    junk += ["env/pyvenv.cfg", "env/lib/x.py", ".cloudtrain/runs/x", "store/.cloudtrain", "store/x", "pulled/x"]
    repository(tmp_path, dict.fromkeys((*junk, "a/ok.py"), ""))
    (tmp_path / ".cloudtrainignore").write_text("!*\n")
    os.mkfifo(tmp_path / "pipe")
    git(tmp_path, "add", "-f", "node_modules", "a")
    made = bundle(tmp_path, git=use_git, never=(tmp_path / "pulled", tmp_path / "none"))
    assert paths(made) == [".cloudtrainignore", "a/ok.py", ENTRY]
    assert all(rule.startswith("built-in: ") for rule in rules(made).values())
    assert rules(made)["pipe"] == "built-in: not a regular file"
    assert {"env/", "store/", "pulled/", ".cloudtrain/", "a/__pycache__/", "a/b.pyc"} < set(rules(made))


@pytest.mark.parametrize("use_git", [True, False])
def test_a_notebook_ships_when_it_is_asked_for_alone(tmp_path: Path, use_git: bool) -> None:
    repository(tmp_path, {"a/try.ipynb": "{}", "nb.ipynb": "{}", "notes.txt": ""})
    made = bundle(tmp_path, git=use_git)
    assert paths(made) == [ENTRY, "notes.txt"] or paths(made) == ["notes.txt", ENTRY]
    assert rules(made)["nb.ipynb"] == "built-in: notebook; !nb.ipynb in .cloudtrainignore ships it"
    (tmp_path / ".cloudtrainignore").write_text("!nb.ipynb\n")
    made = bundle(tmp_path, git=use_git)
    assert "nb.ipynb" in paths(made)
    assert "a/try.ipynb" in rules(made)


def test_dependencies_ship_beside_the_source(tmp_path: Path) -> None:
    code = repository(tmp_path / "code", {"own/x.py": ""})
    files(tmp_path / "lib", {"a.py": "", ".gitignore": "b.py\n", "b.py": "", "c.py": "", "__pycache__/x": ""})
    made = bundle(code, dependencies=("../lib", "own"), exclude=("/lib/c.py",))
    assert paths(made) == ["lib/.gitignore", "lib/a.py", f"lib/{ENTRY}", "own/x.py", ENTRY]
    assert {"lib/b.py", "lib/c.py", "lib/__pycache__/"} < set(rules(made))
    with tarfile.open(fileobj=io.BytesIO(made.archive())) as tar:
        assert "lib/a.py" in tar.getnames()
    alone = bundle(code, dependencies=("../lib",), exclude=("/*", f"!/{ENTRY}"))
    assert paths(alone) == ["lib/.gitignore", "lib/a.py", "lib/c.py", f"lib/{ENTRY}", ENTRY]
    files(tmp_path / "else/own", {})
    assert refused(code, dependencies=("../lib", "../else/own")).field == "source.dependencies[1]"


# ------------------------------------------------------------------------------------------------------------- refusals

PEM = "-----BEGIN RSA PRIVATE KEY-----\n"
ACCOUNT = json.dumps({"type": "service_account", "private_key": "x"})
USER = json.dumps({"refresh_token": "x", "type": "authorized_user"}, indent=1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *[(name, "") for name in (".env", "a/.env.local", "id_rsa", ".ssh/id_ed25519", ".netrc", ".aws/credentials")],
        *[
            (name, "")
            for name in (".boto", "azureauth.json", ".azure/msal_token_cache.bin", "kubeconfig", ".kube/config")
        ],
        *[("tls.pem", PEM), ("x.key", PEM), ("sa.json", ACCOUNT), ("adc.json", USER)],
        *[(".npmrc", "//registry/:_authToken=x"), (".pypirc", "[pypi]\npassword = x\n")],
    ],
)
def test_secrets_are_refused_unless_named(tmp_path: Path, name: str, text: str) -> None:
    files(tmp_path, {name: text})
    error = refused(tmp_path)
    assert name in str(error)
    assert f"!/{name}" in error.hint
    (tmp_path / ".cloudtrainignore").write_text("!*\n!.*\n")
    refused(tmp_path)
    (tmp_path / ".cloudtrainignore").write_text(f"!/{name}\n")
    assert name in paths(bundle(tmp_path))
    (tmp_path / ".cloudtrainignore").write_text(f"/{name}\n")
    assert name not in paths(bundle(tmp_path))


def test_what_only_looks_like_a_secret_ships(tmp_path: Path) -> None:
    harmless = {".env.example": "A=", ".env.template": "", "a.pem": "CERTIFICATE", "x.key": "up", "environment": ""}
    harmless |= {"a.json": '{"type": "service_account"}', ".npmrc": "save=1", "credentials": "", "my_id_rsa": ""}
    files(tmp_path, {**harmless, "big.json": ACCOUNT + " " * 2**16})
    assert len(bundle(tmp_path).files) == len(harmless) + 2


def test_a_tree_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    files(tmp_path, {f"data/{i}": b"x" * (i * 1000) for i in range(1, 9)})
    with open(tmp_path / "huge", "wb") as huge:
        huge.truncate(2**42)
    error = refused(tmp_path)
    text = f"{error}; {error.hint}"
    assert "huge (4194304.0 MiB), data/8 (0.0 MiB), data/7" in text
    assert "data/4 " not in text
    assert "largest folders: data/ " in text
    assert ".cloudtrainignore" in text
    assert "max_code_mb" in text
    assert "among them" not in text
    assert bundle(tmp_path, exclude=("huge",), max_bytes=36_000 + 8).size == 36_000 + 8
    assert "limit" in str(refused(tmp_path, exclude=("huge",), max_bytes=36_000 + 7))


def test_an_input_that_ships_as_code_is_named(tmp_path: Path) -> None:
    files(tmp_path / "code", {"train.py": "", "data/x/1": b"x" * 2000, "database": b"x" * 2000})
    source = Source(path="code", entry_point="train.py")
    with pytest.raises(SpecError, match=r"largest folders.*; the input data/x is among them") as refused:
        build_bundle(source, cwd=tmp_path, max_bytes=100, inputs=["s3://data/x", "dat", "code/data/x"])
    assert refused.value.hint == "add this line to .cloudtrainignore: /data/x, or raise the setting max_code_mb"


def test_links_inside_the_tree_stay_links(tmp_path: Path) -> None:
    files(tmp_path, {"real/x.py": "", "real/deep/y": ""})
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real/deep/up").symlink_to("../x.py")
    (tmp_path / "dangling").symlink_to("none")
    made = bundle(tmp_path, entry_point="folder/x.py")
    assert {file.path: file.link for file in made.files if file.link} == {
        "dangling": "none",
        "folder": "real",
        "real/deep/up": "../x.py",
    }
    assert made.entry_point == "real/x.py"


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside", "loop/../x", "{root}/train.py"])
def test_links_out_of_the_tree_are_refused(tmp_path: Path, target: str) -> None:
    root = files(tmp_path / "code", {"sub/x": ""})
    (root / "loop").symlink_to(".")
    (root / "bad").symlink_to(target.format(root=root))
    assert "'bad'" in str(refused(root))
    assert "bad" not in paths(bundle(root, exclude=("bad",)))


def test_names_that_cannot_ship(tmp_path: Path) -> None:
    files(tmp_path / "a", {MANIFEST: ""})
    assert MANIFEST in str(refused(tmp_path / "a"))
    files(tmp_path / "b", {})
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/b/\xff")).touch()
    assert r"b'\xff' is not a UTF-8" in str(refused(tmp_path / "b"))
    assert paths(bundle(tmp_path / "b", exclude=("?",))) == [ENTRY]


def test_a_file_that_cannot_be_read() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = files(Path(name), {"x": ""})
        folder.chmod(0o755)
        (folder / "x").chmod(0)
        with as_nobody(), pytest.raises(StorageError, match="cannot read 'x'"):
            build_bundle(Source(path=name, entry_point=ENTRY), cwd=folder, git=False)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run as another user for a while, in a folder made for that: root can read everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_changes_while_it_is_read() -> None:
    folder = Path("/sys/kernel/mm/ksm")  # where every size is 4096, and every content shorter
    if not folder.is_dir():
        pytest.skip("no such files here")
    with pytest.raises(StorageError, match="changed while it was read"):
        build_bundle(Source(path=str(folder)), cwd=folder)


def test_a_log_that_grows_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own output may go to a file of the code: ``cloudtrain submit train.py | tee run.log``."""
    root, real = files(tmp_path, {"run.log": "one"}), os.open

    def growing(path: str, *rest: int, **options: int) -> int:
        if path == str(root / "run.log"):
            Path(path).write_text("one, two")
        return real(path, *rest, **options)

    monkeypatch.setattr(os, "open", growing)
    made = build_bundle(Source(path=str(root)), cwd=root)
    assert {file.path: file.size for file in made.files}["run.log"] == 3
    assert b"one, two" not in zlib.decompress(made.archive(), 31)


# ----------------------------------------------------------------------------------------------- manifest and archive


def test_the_same_tree_is_the_same_bundle(tmp_path: Path) -> None:
    made = []
    for turn, names in enumerate((["b", "a/x", "ü"], ["ü", "a/x", "b"])):
        old = os.umask(0o077 if turn else 0o002)
        try:
            root = files(tmp_path / str(turn), {name: name for name in names})
            (root / "b").chmod(0o711 if turn else 0o755)
        finally:
            os.umask(old)
        os.utime(root / "a/x", (turn + 1, turn + 1))
        made.append(bundle(root, git=bool(turn)))
    assert made[0].manifest() == made[1].manifest()
    assert made[0].archive() == made[1].archive()
    assert made[0].digest == hashlib.sha256(made[0].manifest()).hexdigest()


def test_manifest_and_archive_say_the_same(tmp_path: Path) -> None:
    files(tmp_path, {"a": "abc", "run.sh": ""})
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("a")
    made = bundle(tmp_path)
    rows = json.loads(made.manifest())
    assert rows[0] == {"path": "a", "mode": "0644", "size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    assert [(row["path"], row["mode"], row.get("link")) for row in rows[1:3]] == [
        ("link", "0644", "a"),
        ("run.sh", "0755", None),
    ]
    with tarfile.open(fileobj=io.BytesIO(made.archive())) as tar:
        members = tar.getmembers()
        assert [m.name for m in members] == [MANIFEST, "a", "link", "run.sh", ENTRY]
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in members} == {(0, 0, 0, "", "")}
        assert tar.extractfile(MANIFEST).read() == made.manifest()  # type: ignore[union-attr]


@pytest.mark.costly
def test_what_does_not_shrink_is_packed_as_it_is(tmp_path: Path) -> None:
    """Each is in blocks of its own. A bundle that is cut between two blocks is not valid."""
    files(tmp_path, {ENTRY: ""})
    (tmp_path / "random").write_bytes(random.Random(0).randbytes(3 << 20))
    (tmp_path / "zeros").write_bytes(bytes(8 << 20))
    made = build_bundle(Source(path=str(tmp_path), entry_point=ENTRY), cwd=tmp_path)
    archive = made.archive()
    assert 3 << 20 < len(archive) < 3.1 * (1 << 20)
    (tmp_path / "archive").write_bytes(archive)
    unpack(tmp_path / "archive", tmp_path / "whole", digest=made.digest)
    for name in ("random", "zeros"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / name).read_bytes()
    member = zlib.decompressobj(wbits=31)
    member.decompress(archive)
    (tmp_path / "archive").write_bytes(archive[: len(archive) - len(member.unused_data)])
    with pytest.raises(DigestError, match="cut short"):
        unpack(tmp_path / "archive", tmp_path / "cut", digest=made.digest)


@pytest.mark.parametrize("change", ["shorter", "other", "gone"])
def test_a_file_that_changed_since_is_not_packed(tmp_path: Path, change: str) -> None:
    files(tmp_path, {"x": "abc"})
    made = bundle(tmp_path)
    (tmp_path / "x").write_text({"shorter": "ab", "other": "abx", "gone": ""}[change])
    if change == "gone":
        (tmp_path / "x").unlink()
    with pytest.raises(StorageError, match="'x'"):
        made.archive()


def test_digests_change_with_content_mode_name_and_link(tmp_path: Path) -> None:
    files(tmp_path, {"x": "abc"})
    seen = {bundle(tmp_path).digest}
    for act in (
        lambda: (tmp_path / "x").write_text("abd"),
        lambda: (tmp_path / "x").chmod(0o755),
        lambda: (tmp_path / "x").rename(tmp_path / "y"),
        lambda: (tmp_path / "l").symlink_to("x"),
        lambda: ((tmp_path / "l").unlink(), (tmp_path / "l").symlink_to("y")),
    ):
        act()
        seen.add(bundle(tmp_path).digest)
    assert len(seen) == 6


# ---------------------------------------------------------------------------------------------- scripts that can be run


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("train.py", b"def broken(:\n", "train.py:1: invalid syntax; fix this line: def broken(:"),
        ("train.py", b"x = 1\nprint 'x'\n", "train.py:2: Missing parentheses"),
        ("train.py", b"\x00\x01", "train.py"),
        ("train.py", b"'\xff'\n", "train.py:1"),
        ("pkg/mod.py", b"return 1\n", "pkg/mod.py:1: 'return' outside function"),
    ],
)
def test_what_python_cannot_parse_is_refused_with_its_line(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    files(tmp_path, {name: ""})
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecError) as caught:
        check_script(tmp_path, "-m pkg.mod" if name == "pkg/mod.py" else name)
    assert caught.value.field == "source.entry_point"
    assert says in f"{caught.value}; {caught.value.hint}"


@pytest.mark.parametrize(
    "line",
    [
        "try:\n    pass\nexcept* OSError:\n    pass",
        "type Pair[T] = tuple[T, T]",
        "def first[T](x: T) -> T:\n    return x",
        "print(f'{d['a']}')",
        "print(t'{x}')",
        "try:\n    pass\nexcept OSError, ValueError:\n    pass",
        "x = [*a for a in b]",
        "lazy import json",
        "'\\d'",
    ],
)
def test_syntax_of_a_newer_python_than_this_one_passes(tmp_path: Path, line: str) -> None:
    files(tmp_path, {"train.py": line + "\n"})
    check_script(tmp_path, "train.py")


def test_a_zip_file_passes_as_python_runs_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "print(1)")
    check_script(tmp_path, "app.pyz")


def test_a_folder_names_its_scripts(tmp_path: Path) -> None:
    files(tmp_path, {"pkg/a.py": "", "pkg/b.py": "", "pkg/main.py": "", "pkg/__init__.py": "", "empty/x": ""})
    with pytest.raises(SpecError, match="is a folder") as caught:
        resolve(Source(entry_point="pkg"), cwd=tmp_path)
    assert caught.value.hint == "name the script, such as pkg/main.py, pkg/a.py, pkg/b.py"
    with pytest.raises(SpecError, match=r"no \.py file"):
        resolve(Source(entry_point="empty"), cwd=tmp_path)
