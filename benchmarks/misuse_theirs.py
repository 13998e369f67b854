"""Errors of PyTorch or Python that stand as they are, and values that are accepted though the annotation excludes them.

Every entry has its reason.
"""

import re
from typing import NamedTuple


class Theirs(NamedTuple):
    """Errors of other libraries that stand as they are."""

    public: str
    """A regular expression for the public name, methods included."""
    parameter: str
    """A regular expression for the argument."""
    text: str
    """A regular expression for the error's type and message."""
    reason: str
    """The reason why an error of ours would not say more."""


_USERS = "the user's own function raised it, and its traceback says where"
_FORWARD = "the user's own model refuses its input, in PyTorch's words"
THEIRS: list[Theirs] = [
    Theirs(".*", "devices?", r"RuntimeError: (Expected one of|Invalid device|Device index|Device string|Cannot access)",
           "PyTorch lists the devices that there are"),
    Theirs(".*", "devices?", "AssertionError: Torch not compiled with CUDA", "PyTorch says what the device needs"),
    Theirs(".*", ".*", r"TypeError: .*(missing \d+ required|unexpected keyword argument|positional argument)",
           "Python names the argument that is missing or unknown"),
    Theirs(".*", ".*", r"(FileNotFoundError|NotADirectoryError|IsADirectoryError|PermissionError|FileExistsError): "
           r"\[Errno \d+\] .*'.*'", "the system names the path, and what is wrong with it"),
    Theirs(".*", ".*", "IsADirectoryError", "the system names the folder where a file should be"),
    Theirs(".*", ".*", r"TypeError: cannot pickle", "Python names the class that cannot be pickled"),
    Theirs("", "", r"RuntimeError: Trying to backward through the graph a second time",
           "PyTorch says what retain_graph=True is for"),
    Theirs(r"testing\.GPT\.forward|advisor\.advise", "tokens|targets|batch|model", ".*", _FORWARD),
    Theirs(r"(tiers\.check_version)?", "(version)?", r"RuntimeError: one of the variables needed for gradient comp",
           "PyTorch's own error, word for word, since what was saved is checked as it does"),
    Theirs(r"offload\.OffloadedModule\.forward|remat\..*(__call__|forward)", "arguments|keywords", ".*", _FORWARD),
    Theirs(r"offload\.(activations|wrap|training)|remat\.(optimize|compile)|integrations\..*",
           "model|module|step|example_inputs", "RuntimeError: mat1 and mat2", _FORWARD),
    Theirs(".*", "policy|loss|function|scheduler|make|make_job|stop|progress|after_round|wait", ".*", _USERS),
    Theirs(r"(tiers\.Budget\.credit)?", ".*", "InternalError: .*given back",
           "only rooms give back what they took, so that too much is a bug in one of them"),
    Theirs(r"unified\.UnifiedTensor\.__getitem__|", "index|", r"(IndexError|TypeError|ValueError|RuntimeError): "
           r"(only integers, slices|index -?\d+ is out|too many ind|tensors used as ind|step must|"
           r"The shape of the mask|Python int too large|Overflow when|can't convert|invalid literal|new\(\): invalid)",
           "a unified tensor is indexed as PyTorch's, and refuses as PyTorch does"),
    Theirs(r"unified\.Loader", "features", r"IndexError: index .*is out", "PyTorch names the row that is not there"),
    Theirs(r"relational\.Layer\..*", "args", ".*", "what is no tensor is a constant of the user's function"),
    Theirs(r"integrations\.OptunaStopper\.__call__", "step", "ValueError: `step=", "Optuna names the argument"),
    Theirs(r"remat\.optimize", "step", ".*", _FORWARD),
    Theirs(".*", ".*", r"RuntimeError: .*DefaultCPUAllocator: can't allocate", "PyTorch says how many bytes it was"),
    Theirs("", "", r"ValueError: .* such as the user says", "a user's own generator or step raised it"),
    Theirs("", "", r"(Unsupported|TorchRuntimeError): ", "Dynamo shows the operator, its shapes and the user's line"),
    Theirs(r"tiers\.set_generator_state", "state", "TypeError: RNG state must be", "PyTorch says what a state is"),
]  # fmt: skip

ENDLESS: frozenset[tuple[str, str, str]] = frozenset(
    {
        ("probe.in_rounds", "rounds", "2**70"),
        ("advisor.advise", "rounds", "2**70"),
        ("remat.max_batch", "budget", "2**70"),
    }
)
"""Calls that do as they are told for longer than the campaign waits: public name, parameter, value."""

ACCEPTED: dict[tuple[str, str], str] = {}
"""Values that are accepted though the annotation excludes them: public name and parameter, to the reason."""


def reason_for(error: BaseException, public: str, parameter: str) -> str:
    """Return why another library's error stands; empty if it does not."""
    text = f"{type(error).__name__}: {error}"
    for entry in THEIRS:
        if (
            re.fullmatch(entry.public, public)
            and re.fullmatch(entry.parameter, parameter)
            and re.match(entry.text, text)
        ):
            return entry.reason
    return ""
