"""The device is a value: who makes it, and who still asks torch."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest
import torch

from megatron.packing.device import CPU, Device
from tests.unit_tests.test_imports import FILES, ROOT

ASKING = {
    # Makes the value, and copies between host and device.
    "packing/device.py": 9,
    "sft/distributed.py": 3,
    # Kernels, of the tensors that they compute with.
    "packing/model/attention/kernels.py": 1,
    "sft/model/weight_gradients.py": 1,
    # Dequantizes into a parameter in the host's memory, and into others by way of it.
    "sft/model/huggingface/read.py": 1,
    # Move or write tensors, as they lie on the device or on the host; `fit` traces both.
    "packing/model/layer_inputs.py": 2,
    "sft/model/checkpoints/read.py": 1,
    "sft/model/checkpoints/shares.py": 1,
    # Embeds with another function on a CPU, whose sums of gradients stop growing.
    "sft/model/mcore_fixes.py": 1,
    # Words its message where somebody's model asks for a GPU that is not there.
    "packing/doctor/unusable.py": 1,
    # Blending imports nothing of packing: pinned memory, and memory that processes share.
    "blending/energon/_loading/rank_loader.py": 1,
    "blending/loading/worker.py": 1,
}
"""How often each file below `megatron` asks torch what a device is."""
FROM_PROCESS = {
    # Programs, before a config is there.
    "planner/calibrate.py",
    "sft/commands/chat.py",
    "sft/fit/verify.py",
    "sft/fit/fake/world.py",
    # What is changed of megatron-core, for the whole process.
    "sft/model/cpu_support.py",
    "sft/model/mcore_fixes.py",
    # Functions that scripts call without a config.
    "packing/step/groups.py",
    "packing/step/transformer_engine.py",
}
"""Files that take the device of the process, instead of being given one."""
WORDS = ("is_cuda", "is_cpu", "torch.cuda.", '"cuda"', '"cpu"')
FACTS = ("is_available", "device_count", "get_device_capability", "get_device_name")


def asks(node: ast.AST) -> bool:
    """Returns whether an expression asks for the kind of a device, or for facts of a GPU."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_cpu") or (
            node.attr in (*FACTS, "get_device_properties")
            and ast.unparse(node.value) == "torch.cuda"
        )
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides) and (
            "'cuda'" in ast.unparse(node) or "'cpu'" in ast.unparse(node)
        )
    return False


def num_questions(text: str) -> int:
    """Returns how often a module asks."""
    if not any(word in text for word in WORDS):  # most modules: parsing them takes seconds
        return 0
    return sum(map(asks, ast.walk(ast.parse(text))))


def test_who_asks_torch_for_the_device() -> None:
    """A way that code takes on a GPU alone is not taken where `fit` describes one: its memory would
    be that of a CPU, and nobody would see it. Ask the `Device` instead.
    """
    texts = {path.relative_to(ROOT / "megatron").as_posix(): path.read_text() for path in FILES}
    found = {name: num_questions(text) for name, text in texts.items()}
    assert {name: number for name, number in found.items() if number} == ASKING
    assert {name for name, text in texts.items() if "Device.here()" in text} == FROM_PROCESS


@pytest.mark.parametrize(
    "text",
    [
        "x = q.is_cuda",
        "x = 'cuda' != device.type",
        "x = torch.cuda.is_available() and y",
        "x = q.device.type in ('cpu', 'meta') or 'torch.cuda.'",
    ],
)
def test_each_way_of_asking_is_found(text: str) -> None:
    """One that is not seen would come back."""
    assert num_questions(text) + num_questions(text.replace("'", '"')) >= 1
    assert num_questions("x = q.type, 'is_cuda'") == 0


def test_a_device_is_the_configs_else_the_tensors_else_the_processs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tensors on the CPU of a machine with a GPU would go to its kernels; a script chooses its GPU
    after the plug-in is installed.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu, x = Device("cuda", 1), torch.zeros(1)
    config = SimpleNamespace(device="cuda")  # a script's own
    assert Device.of(SimpleNamespace(device=gpu), x) is gpu
    assert Device.of(config, x) == CPU
    assert Device.of(config, torch.zeros(1, device="meta")).place == torch.device("meta")
    here = Device.of(config)
    assert (here.is_gpu, gpu.is_gpu, CPU.is_gpu) == (True, True, False)
    for current in (0, 3):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert here.place == torch.device("cuda", current)
    assert (gpu.place, CPU.place) == (torch.device("cuda", 1), torch.device("cpu"))
    on_host = SimpleNamespace(use_cpu_initialization=True)
    assert gpu.initial_place(on_host) == torch.device("cpu")
    assert gpu.initial_place(SimpleNamespace(use_cpu_initialization=False)) == gpu.place
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Device.of(config) is CPU
    assert CPU.triton_fault == "no GPU"


def test_a_thread_works_on_the_gpu_of_its_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with GPU 0: all ranks would take memory there."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    enter = Device("cuda").entry()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # in the thread
    for begin in (enter, Device("cuda", 2).entry(), CPU.entry()):
        begin()
    assert taken == [torch.device("cuda", 3), torch.device("cuda", 2)]
