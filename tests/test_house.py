"""The rules of the house, read from the source."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import penstock

SOURCE = Path(penstock.__file__).parent
LAYERS = {
    "_deprecated": 0, "_version": 0, "errors": 0, "units": 0, "arguments": 0, "forks": 0, "storages": 0,
    "devices": 1, "directio": 1, "files": 1, "living": 1, "links": 1, "machines": 1, "native": 1, "ranks": 1,
    "stepping": 1,
    "checkpoints": 2, "probe": 2, "tensorfiles": 2,
    "tiers": 3,
    "host_stepping": 4,
    "state": 5,
    "training": 6,
    "offload": 7, "remat": 7, "fleet": 7, "unified": 7,
    "relational": 8,
    "testing": 9, "report": 9, "advisor": 9, "integrations": 9,
    "cli": 10,
    "__main__": 11,
}  # fmt: skip
"""Imports point to a lower number, or stay inside their room."""
FILES = sorted(SOURCE.rglob("*.py"))
MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages([str(SOURCE)], "penstock.")
    if not module.name.rpartition(".")[2].startswith("_")
)


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "penstock":
            if node.module == "penstock":
                yield from (f"penstock.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "penstock")


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.parent != SOURCE or file.name != "__init__.py"], ids=str
)
def test_imports_run_one_way(file):
    relative = file.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    for module in imported(file):
        other = room_of(module)
        assert other == room or LAYERS[other] < LAYERS[room], f"{relative} imports {module}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_nobody_imports_another_rooms_private_files(file):
    room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    for module in imported(file):
        parts = module.split(".")[1:]
        private = [part for part in parts if part.startswith("_") and part not in ("_deprecated", "_version")]
        assert not private or parts[0] == room, f"{file} imports {module}"


@pytest.mark.parametrize("file", [file for file in FILES if file.name == "__init__.py"], ids=str)
def test_maps_are_short(file):
    assert len(file.read_text().splitlines()) <= 70


@pytest.mark.parametrize("file", FILES, ids=str)
def test_files_are_of_a_size_to_read(file):
    assert len(file.read_text().splitlines()) <= 600


RIDDLES = ("Of", "What", "Those", "That")
"""Words with which a docstring begins that tells what a thing is of, and not what it is."""


def docstrings(file):
    for node in ast.walk(ast.parse(file.read_text())):
        for statement in getattr(node, "body", ()) if isinstance(getattr(node, "body", ()), list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, statement.value.value


@pytest.mark.parametrize("file", FILES, ids=str)
def test_docstrings_begin_with_a_verb_or_with_what_a_thing_is(file):
    documented = [(line, text) for line, text in docstrings(file) if isinstance(text, str)]
    assert not [(line, text.split("\n")[0]) for line, text in documented if text.split()[0] in RIDDLES]


PRIVATE = {
    "fleet/_accesses.py": "a dispatch mode sees which tensors of a model an operator uses",
    "fleet/_halves.py": "a dispatch mode sees which weights are only cast",
    "fleet/_program.py": "torch.export prints the graph so far when it gives up",
    "fleet/_random.py": "a dispatch mode draws a job's random numbers from its own state",
    "fleet/_run.py": "PyTorch's tracing leaves something with the first thread that traces",
    "state/_casts.py": "how many tensors have a storage, and whose gradient is being computed",
    "state/_copies.py": "copies are hidden from dispatch modes",
    "offload/_functional.py": "hooks step aside for torch.func, whose tensors are wrapped",
    "offload/_modelled.py": "a dispatch mode counts what each operator does",
    "offload/_run.py": "hooks run outside of Dynamo, and ask autograd what it is doing",
    "state/_pages.py": "copies are hidden from dispatch modes",
    "state/_past.py": "compiled graphs of Inductor as they are called, and how torch.save writes storages",
    "state/_promise.py": "whether backward runs",
    "state/_watch.py": "the stack of dispatch modes, and what Dynamo skips",
    "probe/_allocations.py": "the profiler's events, where there is no compiler",
    "probe/_peak.py": "tensors that own no bytes",
    "remat/_aot.py": "AOTAutograd",
    "remat/_capture.py": "joint graphs, and what autograd is doing",
    "remat/_dynamo.py": "Dynamo",
    "remat/_inductor.py": "Inductor",
    "remat/_rest.py": "hooks run outside of Dynamo",
    "state/_modelled.py": "a dispatch mode sees the operators of a step on tensors without bytes",
    "storages.py": "a storage's identity, without making an object of it",
    "testing/simulated/_load.py": "a kind of device gets its module",
    "tiers/_gate.py": "whether autograd runs backward on this thread",
    "devices/_accelerator.py": "the current stream and the allocator's numbers, which are asked for at every operator",
    "tiers/_layout.py": "a bit of views that no public name has",
    "unified/_operators.py": "tensors in lists, among an operator's arguments",
    "unified/_tensor.py": "operators of unified tensors run outside of Dynamo",
    "unified/_tiered.py": "rows are read outside of Dynamo, and features are found among arguments",
}
"""Files that touch private names of PyTorch, each with the reason; tests beside them fail when PyTorch moves one."""


def private_names(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = node.module.split(".")
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
        else:
            continue
        yield from (name for name in names if name.startswith("_") and not name.startswith("__"))


def test_private_names_of_pytorch_are_in_few_files():
    touching = {str(file.relative_to(SOURCE)) for file in FILES if any(private_names(file))}
    assert touching == set(PRIVATE)


NAMES_CUDA = {
    "cli/_bench_step.py": "sizes of the models that it measures, by what --device says",
    "cli/_choices.py": "what --device may be",
    "directio.py": "GPUDirect Storage",
    "fleet/_random.py": "the name of a state in checkpoints",
    "probe/_gds.py": "GPUDirect Storage",
    "probe/_rounds.py": "a version that PyTorch was built for",
    "relational/_indexes.py": "kernels: what a graph of CUDA's may not wait for",
    "relational/_run.py": "kernels",
    "relational/_steps.py": "kernels",
    "relational/_triton.py": "kernels",
    "remat/_dynamo.py": "what Dynamo's tracing is told of captures",
    "unified/_advice.py": "what CUDA's driver is told of memory",
    "unified/_draw.py": "kernels",
    "unified/_functions.py": "names of attributes and methods of tensors",
    "unified/_gather.py": "kernels",
    "unified/_memory.py": "memory that kernels read in place",
    "unified/_operators.py": "kernels",
    "unified/_store.py": "kernels",
    "unified/_tensor.py": "kernels",
    "unified/_tiered.py": "kernels",
}
"""Files outside of `devices` that say CUDA, each with the reason."""


def says_cuda(file):
    """Whether code does; docstrings and texts with more than the name may."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            is_module = (
                node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id in ("torch", "version")
            )
            is_version = node.attr == "cuda" and ast.unparse(node.value) == "torch.version"
            if node.attr == "is_cuda" or is_module or is_version:
                return True
        elif isinstance(node, ast.Constant) and node.value in ("cuda", "is_cuda"):
            return True
    return False


@pytest.mark.parametrize("file", sorted((SOURCE / "state").glob("*.py")), ids=str)
def test_planning_makes_no_tuple_from_a_generator(file):
    """It runs in a thread. While another one has a list of all objects (``gc.get_objects``), such a tuple fails:
    CPython shortens it, and finds that somebody else has it ("bad argument to internal function").
    """
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tuple" and node.args:
            what = node.args[0]
            assert not isinstance(what, ast.GeneratorExp), f"{file.name}:{node.lineno}"
            is_iterator = isinstance(what, ast.Call) and ast.unparse(what.func) in ("map", "filter", "zip")
            assert not is_iterator, f"{file.name}:{node.lineno}"


def test_which_kind_a_device_is_only_backends_ask():
    saying = {str(file.relative_to(SOURCE)) for file in FILES if file.parent.name != "devices" and says_cuda(file)}
    assert saying == set(NAMES_CUDA)


def public_names(module):
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if getattr(value, "__module__", "").startswith("penstock"):
            yield name, value


def test_every_name_has_one_public_home():
    homes = {}
    for module_name in MODULES:
        for name, value in public_names(importlib.import_module(module_name)):
            if inspect.isclass(value) or inspect.isfunction(value):
                homes.setdefault(id(value), []).append(f"{module_name}.{name}")
    several = [places for places in homes.values() if len(places) > 1 and not _same_package(places)]
    assert several == []


def _same_package(places):
    """A file that is itself public (`penstock.units`) is no second home of what it imports for itself.

    And the door of `training` is in `offload`, where people know it.
    """
    rooms = {place.split(".")[1] for place in places}
    return rooms == {"offload", "training"} or (len(rooms) > 1 and any(LAYERS[room] <= 1 for room in rooms))


@pytest.mark.parametrize("module_name", MODULES)
def test_every_public_name_is_documented(module_name):
    module = importlib.import_module(module_name)
    assert module.__doc__
    for name, value in public_names(module):
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        assert value.__doc__, f"{module_name}.{name}"
        if name != "app" and module.__file__.endswith("__init__.py") and module_name.count(".") == 1:
            assert f"`{name}`" in module.__doc__ or f"`{name}(" in module.__doc__, (
                f"{name} is not on the map of {module_name}"
            )


@pytest.mark.parametrize("module_name", MODULES)
def test_every_public_method_and_field_is_documented(module_name):
    for _, value in public_names(importlib.import_module(module_name)):
        if not inspect.isclass(value):
            continue
        for method_name, method in vars(value).items():
            if method_name.startswith("_"):
                continue
            if inspect.isfunction(method) or isinstance(method, property):
                assert inspect.getdoc(getattr(value, method_name)), f"{value.__qualname__}.{method_name}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_dataclass_fields_are_documented(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or not node.decorator_list:
            continue
        if not any(
            "dataclass" in ast.unparse(decorator) and "frozen" in ast.unparse(decorator)
            for decorator in node.decorator_list
        ):
            continue
        for field, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{file.name}: {node.name}.{ast.unparse(field.target)}"


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_library_does_not_print_and_reads_no_environment_at_import(file):
    tree = ast.parse(file.read_text())
    if file.parent.name != "cli":
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
    for statement in tree.body:
        if not isinstance(statement, ast.FunctionDef | ast.ClassDef):
            assert "environ" not in ast.unparse(statement).replace("import", "")


def test_rooms_load_on_first_use():
    code = (
        "import sys, penstock\n"
        "assert 'torch' not in sys.modules and 'penstock.tiers' not in sys.modules\n"
        "assert penstock.units.parse_bytes('1KiB') == 1024\n"
        "assert 'torch' not in sys.modules\n"
        "penstock.offload.activations\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_room_names_those_there_are():
    with pytest.raises(AttributeError, match="offload"):
        penstock.attic  # noqa: B018
    assert "offload" in dir(penstock)


def test_version_comes_from_one_place():
    assert penstock.__version__ in (SOURCE / "_version.py").read_text()


MOST_METHODS, MOST_ATTRIBUTES = 20, 12


def width(node):
    """The number of methods of a class and of attributes that it declares or sets on itself."""
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
    declared = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    stored = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    return len(methods), len(declared | stored)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_wide_class_says_why(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            methods, attributes = width(node)
            is_wide = methods > MOST_METHODS or attributes > MOST_ATTRIBUTES
            says_why = "wide because" in " ".join((ast.get_docstring(node) or "").split())
            assert says_why or not is_wide, (
                f"{node.name} has {methods} methods and {attributes} attributes: split it, or say in its docstring that"
                " it is wide because ..."
            )


SHARED_NAMES = {
    "Backend": "torch.compile calls its compilers so, and `devices` its kinds",
}
"""Names of several classes, each with the reason."""


def test_every_class_has_a_name_of_its_own():
    places = defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(SOURCE)))
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in SHARED_NAMES} == {}


NAMES_THAT_SAY_NOTHING = {"one", "found", "made", "given", "at"}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_variables_say_what_they_hold(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assert node.id not in NAMES_THAT_SAY_NOTHING, f"{file}:{node.lineno}: {node.id}"


OTHERS_PRIVATE = {
    ("state/_order.py", "_use_from"): "the order of another step is of the same class",
    ("testing/_faulty.py", "_read_some"): "a tier's own way to read, which a faulty tier wraps",
    ("testing/_faulty.py", "_write_some"): "a tier's own way to write, which a faulty tier wraps",
}
"""Private names of our own that another object uses, each with the reason."""


PYTORCHS_AS_WELL = {
    "_base", "_buffers", "_indices", "_modules", "_opt_called", "_parameters", "_trace", "_values", "_version",
    "_wrapped_by_lr_sched",
}  # fmt: skip


def owned_privately(tree):
    """The private names that a file's classes give to themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (part.name for part in node.body if isinstance(part, ast.FunctionDef))
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    yield part.attr


def test_no_object_uses_what_is_private_to_another():
    trees = {str(file.relative_to(SOURCE)): ast.parse(file.read_text()) for file in FILES}
    ours = {name for tree in trees.values() for name in owned_privately(tree) if re.fullmatch(r"_[a-z]\w*", name)}
    ours -= PYTORCHS_AS_WELL
    used = {
        (file, node.attr)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ours
        if ast.unparse(node.value) not in {"self", "cls", "super()"}
    }
    assert used == set(OTHERS_PRIVATE)
