"""Compilation of the simulated device and its registration in PyTorch."""

import functools
import importlib.util
import sys
import sysconfig
import types
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.native import compile_extension, find_cpp_compiler

NAME = "sim"


@functools.cache
def load() -> types.ModuleType:
    """Make the simulated accelerator this process's accelerator, and return its module, ``torch.sim``. Idempotent.

    The first call on a machine compiles it, which takes about half a minute and 1.2 GB; later calls find it compiled.
    Raises ``PenstockError`` with the reason that ``why_not`` gives, or with the compiler's output.
    """
    reason = why_not()
    if reason is not None:
        raise PenstockError(f"the simulated accelerator cannot be loaded: {reason}")
    torch.utils.rename_privateuse1_backend(NAME)  # type: ignore[attr-defined]
    module = _module(extension())
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)  # type: ignore[attr-defined]
    return module


def why_not() -> str | None:
    """Return why this machine cannot load the device, or ``None`` if it can."""
    if not sys.platform.startswith("linux"):
        return "it needs Linux"
    if find_cpp_compiler() is None:
        return "no C++ compiler was found (c++, g++ or clang++ on the path, or `$CXX`)"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type != NAME:
        return f"this machine has a real accelerator, {accelerator.type!r}"
    return None


@functools.cache
def extension() -> Any:  # any: a module that mypy does not know
    """Load the compiled part."""
    spec = importlib.util.spec_from_file_location("simulated_device", compile_device())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_device() -> Path:
    """Compile the device, unless that was done before, and return the file. PyTorch is not changed."""
    source = Path(__file__).parent / "simulated_device.cpp"
    return compile_extension(source, _flags(), versions=f"{torch.__version__} {sys.version}")


def _flags() -> list[str]:
    folder = Path(torch.__file__).parent
    headers, libraries = folder / "include", folder / "lib"
    return [
        *("-O1", "-std=c++20", "-w"),
        f"-I{headers}",
        f"-I{headers / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-I{sysconfig.get_paths()['include']}",
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
        *("-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]


class _OwnStream(torch.Stream):
    """A stream that is never equal to those of `torch.accelerator`, as CUDA's own streams are not."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OwnStream) and super().__eq__(other)

    __hash__ = torch.Stream.__hash__


def _module(compiled: Any) -> types.ModuleType:
    """Return the module with the names that PyTorch and programs look for in ``torch.<kind>``."""
    accelerator = torch.accelerator

    def generator(device: torch.device | int | None = None) -> torch.Generator:
        index = device if isinstance(device, int) else torch.device(device or NAME).index
        index = accelerator.current_device_index() if index is None else index
        chosen: torch.Generator = compiled.default_generator(index)
        return chosen

    def manual_seed_all(seed: int) -> None:
        for index in range(compiled.NUM_DEVICES):
            generator(index).manual_seed(seed)

    def default_stream(device: torch.device | int | None = None) -> torch.Stream:
        index = device if isinstance(device, int) else torch.device(device or NAME).index
        index = accelerator.current_device_index() if index is None else index
        kind = torch.device(NAME, index)
        return _OwnStream(stream_id=0, device_index=index, device_type=torch.Stream(kind).device_type)

    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # without it, checkpointing does not save the device's random state
        "_is_in_bad_fork": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: compiled.NUM_DEVICES,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "get_device_name": lambda _=None: "simulated accelerator",
        "synchronize": accelerator.synchronize,
        "current_stream": accelerator.current_stream,
        "default_stream": default_stream,
        "set_stream": accelerator.set_stream,
        "stream": _on_stream,
        "Stream": functools.partial(torch.Stream, device=NAME),
        "Event": functools.partial(torch.Event, device=NAME),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda *_: True,
        "device": _CurrentDevice,
        "_DeviceGuard": _CurrentDevice,
        "register_host_memory": compiled.register_host,
        "unregister_host_memory": compiled.unregister_host,
    }
    module = types.ModuleType(f"torch.{NAME}")
    for name, value in members.items():
        setattr(module, name, value)
    return module


def _on_stream(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else stream


class _CurrentDevice:
    """A context manager that makes a device current."""

    def __init__(self, device: torch.device | str | int | None):
        self._index = device if isinstance(device, int) else torch.device(device or NAME).index
        self._before = 0

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        if self._index is not None and self._index >= 0:
            torch.accelerator.set_device_index(self._index)

    def __exit__(self, *exception: object) -> None:
        torch.accelerator.set_device_index(self._before)
