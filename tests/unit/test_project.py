"""The files around the package agree with each other and with what the README promises."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
TEXT = {".py", ".md", ".toml", ".yml", ".cfg", ".csv", ".json", ".ipynb", ""}
TARGETS = sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)))


def text_files():
    for path in sorted(ROOT.rglob("*")):
        folders = path.relative_to(ROOT).parts[:-1]
        made = [name for name in folders if name in ("__pycache__", "dist") or name[0] == "." and name != ".ci"]
        if not made and path.is_file() and path.suffix in TEXT:
            yield path


def name_of(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement.strip())[0].lower()


def test_conda_s_environment_agrees_with_pyproject():
    """Whoever comes with conda gets the same versions: Jupyter's are named twice, the rest is left to pip."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    required = {name_of(line): line for line in PYPROJECT["project"]["dependencies"]}
    required["python"] = "python" + PYPROJECT["project"]["requires-python"]
    plain = [line for line in environment["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in environment["dependencies"] if isinstance(line, dict)]
    assert list(map(name_of, plain)) == ["python", "pip", "jupyterlab", "ipywidgets"]
    for line in plain:
        assert line == required.get(name_of(line), "pip")
    assert pip == ["-e ."]


def test_what_is_installed_is_what_is_required():
    from importlib.metadata import version

    from packaging.requirements import Requirement

    for line in PYPROJECT["project"]["dependencies"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(version(requirement.name)), line


def test_trl_stays_on_one_minor_version():
    """The simulator wraps private names of TRL's trainer; a new minor version has renamed some before."""
    (trl,) = [line for line in PYPROJECT["project"]["dependencies"] if name_of(line) == "trl"]
    assert re.fullmatch(r"trl>=1\.(\d+),<1\.(\d+)", trl)
    low, high = re.findall(r"1\.(\d+)", trl)
    assert int(high) == int(low) + 1


def test_the_version_is_one():
    import grpo_lab

    assert grpo_lab.__version__ == PYPROJECT["project"]["version"]


def test_the_wheel_carries_the_package_its_types_and_its_data(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"grpo_lab/__init__.py", "grpo_lab/py.typed", "grpo_lab/data/cards.csv"} <= names
    for path in (ROOT / "data").rglob("*"):
        if path.is_file():
            assert f"grpo_lab/data/{path.relative_to(ROOT / 'data')}" in names
    assert not [name for name in names if name.startswith(("tests", "notebooks", "scripts"))]
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS" in text
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


@pytest.mark.parametrize("target", TARGETS)
def test_every_make_target_of_the_readme_exists(target):
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)


def test_the_readme_names_the_two_commands():
    assert {"lab", "test"} <= set(TARGETS)


def tree():
    """(path, line) of the README's annotated tree: two spaces a level, and a gap before the annotation."""
    block = re.search(r"```text\n(grpo_lab/.*?)```", README, re.DOTALL).group(1)
    folders: list[str] = []
    for line in block.splitlines():
        entry = re.match(r"( *)(\S+)", line)
        if not entry:
            continue
        del folders[len(entry[1]) // 2 :]
        yield "".join(folders) + entry[2], line
        if entry[2].endswith("/"):
            folders.append(entry[2])


def test_the_tree_in_the_readme_shows_what_is_there_with_a_line_each():
    shown = dict(tree())
    for path, line in shown.items():
        assert (ROOT / path).exists(), path
        assert re.search(r"\S {2,}\S", line), f"{path} has no annotation"
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "grpo_lab").rglob("*.py")}
    missing = {name for name in modules if not Path(name).name.startswith("_")} - set(shown)
    assert not missing, f"modules without a line in the README's tree: {sorted(missing)}"


def test_the_links_and_pictures_of_the_readme_exist():
    for text, target in re.findall(r"!?\[([^\]]*)\]\(([^)]+)\)", README):
        assert text.strip(), f"{target} has no text"
        if not target.startswith(("http", "#")):
            assert (ROOT / target).exists(), target


def test_no_file_names_this_machine_or_an_index():
    """A path of one machine or the address of one package index works nowhere else."""
    machine = re.compile(r"(?<![\w.])/(work|root|Users|home/(?!me/)\w+)/")  # "me" stands for the reader
    index = re.compile("index" + "-url|find" + "-links|py" + r"pi\.org|files\.python" + "hosted")
    for path in text_files():
        text = path.read_text(errors="ignore")
        for pattern in (machine, index):
            found = pattern.search(text)
            assert path == Path(__file__) or not found, f"{path.relative_to(ROOT)}: {found[0]!r}"


@pytest.mark.parametrize("path", sorted((ROOT / "grpo_lab").rglob("*.py")), ids=lambda p: p.name)
def test_a_module_can_be_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 330


def test_the_light_modules_do_not_wait_for_torch():
    """Sliders and searches answer in milliseconds only as long as nothing behind them imports torch."""
    code = "from grpo_lab import course, gpus, plots, recipe; import sys; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL), ids=lambda c: c.split("\n")[0])
def test_the_readme_s_code_runs(code):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests")
    assert run.returncode == 0, run.stderr


def test_the_readme_s_numbers_are_the_simulator_s():
    """Numbers in a README outlive the code that made them: `make pictures` writes these again."""
    import importlib.util

    from grpo_lab import course

    spec = importlib.util.spec_from_file_location("make_pictures", ROOT / "scripts" / "make_pictures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    baseline = script.table(course.waterfall("02", progress=False)).splitlines()[-1]
    assert baseline in README
