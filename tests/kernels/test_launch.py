"""Operators, and the lookup of compiled kernels. The kernels here record how they are called."""

import pytest
import torch

from marginlens.kernels import launch as module
from marginlens.kernels import no_triton
from marginlens.kernels.launch import ceil, launch, operator, power_of_2


def test_marked_for_dynamo_as_torch_marks():
    """By hand, since torch's own decorator imports Dynamo."""
    assert vars(no_triton) == vars(torch.compiler.assume_constant_result(lambda: None))


class Kernel:
    """As Triton's: a launch compiles, and returns what can be launched with every argument, constants included."""

    def __init__(self, interpreted=False):
        self.fn, self.interpreted, self.calls = object(), interpreted, []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.calls.append(("compile", grid, args, options))
            return None if self.interpreted else Compiled(self.calls)

        return run


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("launch", grid, args))


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(module, "_compiled", {})


def test_a_kernel_is_found_again_and_gets_the_same_arguments():
    kernel, x, y = Kernel(), torch.zeros(8), torch.zeros(4, dtype=torch.int64)
    launch(kernel, (3, 2, 1), (x, y), (5, 6), (16, True), 8, 2)
    launch(kernel, (4, 1, 1), (x, y), (7, 6), (16, True), 8, 2)
    first, second = kernel.calls
    assert first == ("compile", (3, 2, 1), (x, y, 5, 6, 16, True), {"num_warps": 8, "num_stages": 2})
    assert second == ("launch", (4, 1, 1), (x.data_ptr(), y.data_ptr(), 7, 6, 16, True))


def test_what_triton_compiles_anew_is_compiled_anew():
    kernel, x = Kernel(), torch.zeros(64)
    cases = [
        ((x,), (16,), 4, 3),
        ((x.double(),), (16,), 4, 3),  # another type
        ((x[1:],), (16,), 4, 3),  # an address that is no multiple of 16
        ((x,), (32,), 4, 3),
        ((x,), (16,), 8, 3),
        ((x,), (16,), 4, 2),
    ]
    for expected in ("compile", "launch"):
        for tensors, constants, warps, stages in cases:
            launch(kernel, (1, 1, 1), tensors, (5,), constants, warps, stages)
            assert kernel.calls[-1][0] == expected
    launch(kernel, (1, 1, 1), (x[4:],), (6,), (16,))  # 16 bytes on, and another number: what there is will do
    assert kernel.calls[-1][0] == "launch"
    other = Kernel()
    launch(other, (1, 1, 1), (x,), (5,), (16,))
    assert other.calls[-1][0] == "compile"


def test_the_interpreter_has_nothing_to_find():
    kernel, x = Kernel(interpreted=True), torch.zeros(8)
    for _ in range(2):
        launch(kernel, (1, 1, 1), (x,), (), ())
    assert [call[0] for call in kernel.calls] == ["compile"] * 2


def test_an_operator_is_well_formed():
    @operator("marginlens_tests::double", lambda x, n: x.new_empty(n * x.shape[0]))
    def double(x: torch.Tensor, n: int) -> torch.Tensor:
        return torch.cat([x] * n)

    x = torch.arange(3.0)
    assert torch.equal(double(x, 2), torch.cat([x, x]))
    torch.library.opcheck(double, (x, 2))


def test_whole_numbers():
    for n in range(1, 70):
        assert ceil(n, 16) == (n + 15) // 16
        assert power_of_2(n) == min(2**k for k in range(8) if 2**k >= n)
