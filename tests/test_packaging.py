"""The wheel, installed away from the repository, holds what it needs and does the same jobs."""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("modeling_revela", "modeling_retromae", "trainers", "hub_cards")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(out), str(ROOT)], check=True, cwd=out)
    (path,) = out.glob("revela_hub-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a command of an environment that has the wheel and the dependencies, but not the repository."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True, cwd=home)
    # The dependencies, as they lie here. A path in a .pth file does not bring that folder's own .pth files along, so
    # an editable install of this repository stays out.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages,) = (home / "venv" / "lib").glob("python3.*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *arguments: object, cwd: Path) -> str:
        command = [str(python.parent / program), *map(str, arguments)]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_wheel_holds_the_packages_and_their_data_and_nothing_else(wheel):
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {"revela_hub.py"}
    for package in PACKAGES:
        files = (path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        ours |= {path.relative_to(ROOT).as_posix() for path in files}
    assert names == ours
    for pattern in (
        r"trainers/recipes/.+\.yaml",
        r"trainers/accelerate_configs/.+\.yaml",
        r"trainers/deepspeed/.+\.json",
    ):
        assert any(re.fullmatch(pattern, name) for name in names), pattern
    assert "hub_cards/retrieval_metric/retrieval_metric.py" in names


def test_wheel_states_license_and_python(wheel):
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert "License-Expression: Apache-2.0\n" in text and "Requires-Python: >=3.10\n" in text


def test_command_runs_from_the_wheel_alone(installed, tmp_path):
    modules = ", ".join(("revela_hub", *PACKAGES))
    code = f"import json, {modules}; print(json.dumps([module.__file__ for module in ({modules})]))"
    for file in json.loads(installed("python", "-c", code, cwd=tmp_path)):
        assert "site-packages" in file and ROOT not in Path(file).parents, file
    assert "prepare" in installed("revela-hub", "--help", cwd=tmp_path)
    listed = installed("revela-hub", "train", "--list", cwd=tmp_path)
    assert len(listed.splitlines()) == len(list((ROOT / "trainers" / "recipes").glob("*.yaml")))


def test_wheel_does_each_job_beside_a_folder_of_the_same_name(installed, tiny_lm_folder, tmp_path):
    # What lies where the user stands must not win over the package.
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "__init__.py").write_text("raise ImportError('this is not the package')\n")
    (tmp_path / "text").mkdir()
    for number in range(8):
        lines = [f"Document {number} says in sentence {line} something of its own." for line in range(60)]
        (tmp_path / "text" / f"{number}.txt").write_text("\n".join(lines))
    options = ("--group-size", 4, "--validation-share", 0.2)
    installed("revela-hub", "prepare", "text", "--out", "prepared", *options, cwd=tmp_path)
    assert list((tmp_path / "prepared").glob("train-*.parquet"))
    run = ("--train_sets", "prepared", "--output_dir", "run", "--max_steps", 1, "--report_to", "none")
    recipe = ("small-run", "--retriever_name_or_path", tiny_lm_folder, "--lm_name_or_path", tiny_lm_folder)
    installed("revela-hub", "train", "revela", *recipe, *run, cwd=tmp_path)
    installed("revela-hub", "export", "run", "retriever", cwd=tmp_path)
    assert "nDCG@10" in installed("revela-hub", "evaluate", "retriever", "--groups", "prepared", cwd=tmp_path)
    assert "Document" in installed("revela-hub", "search", "retriever", "text", "something of its own", cwd=tmp_path)


def test_each_import_is_declared_as_a_dependency():
    declared = {
        re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")
        for line in requires("revela-hub")
        # These have extras of their own, and whoever needs one has it or is told.
        if "extra ==" not in line or line.startswith(("mteb", "deepspeed", "datatrove", "lm-eval", "onnx", "openvino"))
    }
    distributions = packages_distributions()
    missing = {}
    for path in [ROOT / "revela_hub.py", *(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - set(PACKAGES):
                found = {name.lower().replace("_", "-") for name in distributions.get(top, [top])}
                if not found & declared:
                    missing.setdefault(top, []).append(str(path.relative_to(ROOT)))
    assert not missing, missing
