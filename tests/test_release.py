"""What is shipped: the wheel and the source distribution, installed and used outside of the source tree.

Needs the build backend (`pip install 'penstock[dev]'`) and downloads nothing: a fresh environment sees the packages of
the one that runs the tests.
"""

import email
import email.policy
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import penstock

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"dev", "docs", "fleet", "gnn", "hf", "lightning", "mlflow", "ray", "report", "zoo"}
TINY_STEP = """
import tempfile
import torch
import penstock

print(penstock.__file__)
model = torch.nn.Sequential(*[layer for _ in range(3) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())])
batch, parked = torch.randn(1024, 256), 0

def step():
    loss = model(batch).square().mean()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return gradients

plain = step()
with tempfile.TemporaryDirectory() as disk:
    offloader = penstock.offload.activations(model, disk=disk, min_size="4KiB", min_saving=0.0, max_stall=1.0)
    for _ in range(3):
        with offloader:
            offloaded = step()
    print(offloader.tier_statistics().parked_bytes)  # of all steps: the first parks everything
    offloader.close()
assert all(torch.equal(one, two) for one, two in zip(plain, offloaded))
"""


def run(*command, **options):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    options.setdefault("env", environment)
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, made from the source distribution as a user's would be, and that."""
    pytest.importorskip("hatchling", reason="needs the build backend: pip install hatchling")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder, env=dict(os.environ))
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def fresh(built, tmp_path_factory):
    """A Python with the wheel installed, which finds PyTorch and the rest where the tests do."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    beside = [folder for folder in sys.path if PurePosixPath(folder).name in ("site-packages", "dist-packages")]
    (site / "beside.pth").write_text("\n".join(beside) + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", built[0])
    return python


SUFFIXES = (".py", ".c", ".cpp", ".h", ".html", ".css")


def source_files(suffix):
    return {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob(f"*{suffix}")}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    about = {name for name in names if ".dist-info/" in name}
    libraries = {
        f"penstock/native/{name}.so"
        for name in ("indexes", "memory", "relational", "remat", "sampling", "sharing", "unified", "updates")
    }
    assert names - about == set().union(*map(source_files, SUFFIXES)) | {"penstock/py.typed"} | libraries
    assert {PurePosixPath(name).name for name in about} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "LICENSE",
    }  # fmt: skip
    assert {name.replace(".so", ".c") for name in libraries} <= names  # compiled anew where there is a compiler


def test_the_wheel_is_for_this_platform_and_any_python(built):
    platform = sysconfig.get_platform().replace("-", "_")
    assert built[0].name == f"penstock-{penstock.__version__}-py3-none-{platform}.whl"
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/WHEEL")]
        about = email.message_from_bytes(wheel.read(name))
    assert about["Tag"] == f"py3-none-{platform}"
    assert about["Root-Is-Purelib"] == "false"


def test_libraries_bring_no_second_openmp_runtime(built, tmp_path):
    """Names of OpenMP's functions, and no file that has them: auditwheel would bundle that."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf: apt-get install binutils")
    with zipfile.ZipFile(built[0]) as wheel:
        library = wheel.extract("penstock/native/unified.so", tmp_path)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "--dynamic", "--wide", library))
    assert {name.partition(".so")[0] for name in needed} <= {"libc", "libm", "libpthread"}
    assert re.search(r"UND GOMP_parallel\b", run("readelf", "--dyn-syms", "--wide", library))


def test_the_wheel_works_without_a_compiler(fresh, tmp_path):
    folder = Path(run(fresh, Path(__file__).parent / "native" / "without_compiler.py", cwd=tmp_path).split()[0]).parent
    assert folder.is_relative_to(fresh.parents[1])


def test_the_source_distribution_holds_what_tests_and_benchmarks_need(built):
    with tarfile.open(built[1]) as source:
        files = {PurePosixPath(*PurePosixPath(name).parts[1:]).as_posix() for name in source.getnames()}
    assert {f"src/{name}" for name in set().union(*map(source_files, SUFFIXES))} <= files
    wanted = {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "pyproject.toml",
        "hatch_build.py",
        "Makefile",
        "src/penstock/py.typed",
    }
    wanted |= {"tests/conftest.py", "benchmarks/common.py", "examples/sweep.yaml", "docs/index.md"}
    assert wanted <= files
    parts = {part for name in files for part in PurePosixPath(name).parts}
    assert parts.isdisjoint({".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis", "dist"})
    assert not {name for name in files if name.endswith((".so", ".pyc", ".whl"))}


def test_metadata_is_complete(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        (points,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
        about = email.message_from_bytes(wheel.read(name), policy=email.policy.compat32)
        assert "penstock = penstock.cli:app" in wheel.read(points).decode()
        assert "penstock = penstock.remat._entry:compile_backend" in wheel.read(points).decode()
    assert about["Version"] == penstock.__version__
    assert set(about.get_all("Provides-Extra")) == EXTRAS
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Description-Content-Type"] == "text/markdown"
    assert about.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert about["Requires-Python"].replace(" ", "") in (">=3.11,<3.14", "<3.14,>=3.11")
    prefix = "Programming Language :: Python :: "
    versions = {classifier.removeprefix(prefix) for classifier in about.get_all("Classifier")}
    assert versions >= {"3.11", "3.12", "3.13"}


def test_the_version_stands_in_one_file():
    assert "version" not in PROJECT
    assert "version" in PROJECT["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", penstock.__version__)
    assert f"## {penstock.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_closes_what_it_opens():
    lines = (ROOT / "README.md").read_text().splitlines()
    fences = [line for line in lines if line.startswith("```")]
    assert len(fences) % 2 == 0
    assert all(fence == "```" for fence in fences[1::2])
    assert sum(line.startswith("# ") for line in lines if line[2:3].isupper()) >= 1


def test_the_installed_command_works(fresh, tmp_path):
    command = fresh.parent / "penstock"
    assert run(command, "--version", cwd=tmp_path).strip() == f"penstock {penstock.__version__}"
    report = json.loads(run(command, "probe", "--disk", tmp_path, "--json", cwd=tmp_path))
    assert report["environment"]["penstock"] == penstock.__version__
    names = [
        benchmark["name"]
        for benchmark in json.loads(run(command, "bench", "--list", "--json", cwd=tmp_path))["benchmarks"]
    ]
    assert names == ["step"]


def test_the_installed_package_trains(fresh, tmp_path):
    where, parked_bytes = run(fresh, "-c", TINY_STEP, cwd=tmp_path).split()
    assert Path(where).is_relative_to(fresh.parents[1])
    assert int(parked_bytes) > 0


def test_the_installed_package_compiles_its_kernels(fresh, tmp_path):
    code = (
        "import torch; from penstock import remat\n"
        "m = torch.nn.Linear(32, 32)\n"
        "step = remat.optimize(lambda x: m(x).relu().sum(), [torch.randn(64, 32)], None)\n"
        "step(torch.randn(64, 32)).backward()\n"
        "print(step.plan.problem.operators[0].name)"
    )
    assert run(fresh, "-W", "error", "-c", code, cwd=tmp_path).strip()


USER = """
from penstock import offload, probe, remat, units

held: int = probe.peak_bytes(lambda: None).peak_bytes
size: int = units.parse_bytes("6GiB")
plan: remat.RematProblem = remat.RematProblem.load("problem.json")
statistics: type[offload.OffloadStatistics] = offload.OffloadStatistics
"""
WRONG = """
from penstock import probe, units

held: str = probe.peak_bytes(lambda: None).peak_bytes
size: int = units.parse_bytes(6.5)
"""


_OF_OTHERS = ",".join(
    f"{name}.*"
    for name in (
        *("accelerate", "lightning", "matplotlib", "mlflow", "numpy", "optuna", "pydantic", "pytorch_lightning"),
        *("ray", "rich", "torch", "torch_geometric", "transformers", "triton", "typer"),
    )
)
"""What mypy need not read to see Penstock's own types."""


def test_types_are_seen_by_users(fresh, tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nstrict = true\n[mypy-{_OF_OTHERS}]\nfollow_imports = skip\nignore_missing_imports = true\n"
    )
    (tmp_path / "right.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    check = [sys.executable, "-m", "mypy", "--python-executable", str(fresh), "right.py", "wrong.py"]
    output = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert len(re.findall(r"wrong\.py:\d+: error: Incompatible types in assignment", output)) == 1
    assert len(re.findall(r'wrong\.py:\d+: error: Argument 1 to "parse_bytes"', output)) == 1
    assert "Found 2 errors in 1 file (checked 2 source files)" in output


# What an import costs, in modules


def modules_after(code, before=""):
    """Modules that ``code`` loads, beyond what ``before`` did."""
    text = f"import sys\n{before}\nknown = set(sys.modules)\n{code}\nprint(' '.join(set(sys.modules) - known))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_penstock_loads_nothing_but_its_map():
    loaded = modules_after("import penstock")
    assert {name for name in loaded if name.startswith("penstock")} == {"penstock", "penstock._version"}
    assert {name.partition(".")[0] for name in loaded} <= set(sys.stdlib_module_names) | {"penstock"}


HEAVY = {
    "accelerate", "lightning", "matplotlib", "mlflow", "optuna", "pydantic", "ray", "rich", "scipy", "tensorboard",
    "torch._dynamo", "torch_geometric", "transformers", "triton", "typer", "yaml",
}  # fmt: skip


ALLOWED = {"fleet": {"rich"}}
"""A fleet draws a live table."""


@pytest.mark.parametrize("room", ["offload", "remat", "fleet", "unified", "relational", "probe", "tiers"])
def test_a_room_loads_little_beside_torch(room):
    loaded = modules_after(f"import penstock; penstock.{room}", before="import torch")
    tops = {name.partition(".")[0] for name in loaded}
    assert (tops | loaded) & HEAVY <= ALLOWED.get(room, set())


def test_help_loads_no_torch():
    code = "from typer.testing import CliRunner; from penstock.cli import app; CliRunner().invoke(app, ['--help'])"
    loaded = modules_after(code)
    assert {"torch", "numpy", "matplotlib"}.isdisjoint(name.partition(".")[0] for name in loaded)
