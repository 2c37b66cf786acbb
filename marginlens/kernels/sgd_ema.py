"""SGD, the teacher's EMA and both networks' half-precision copies in one kernel, over flat buffers.

Parameters, momenta and the teacher's parameters keep their names, shapes and strides. Only their memory moves, side by
side into flat buffers, so that one launch covers all of it. Importing this module needs triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

BLOCK = 1024
"""Elements per program. Each tensor starts at a multiple of this number; the padding in between stays zero."""
_WARPS = 4
_LANE = 8
"""Gradients are read in units of this many elements: 16 bytes in half precision."""
_NONE, _FULL, _HALF = 0, 1, 2
_TEACHER = "teacher."


@triton.jit
def _sgd_ema(
    p, momentum, half, teacher, teacher_half, owner, table, decay, lr, share, factor, mu, taught,
    TEACHER: tl.constexpr, COPY: tl.constexpr, CLIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update one block of one tensor; slow twin: torch.optim.SGD.step, then nets.ema.ema_update, then .to(half).

    Row i of the table: the address of tensor i's gradient, the tensor's start and size, and the kind of its gradient.
    """
    block = tl.program_id(0)
    tensor = tl.load(owner + block)
    address, start = tl.load(table + 4 * tensor), tl.load(table + 4 * tensor + 1)
    size, kind = tl.load(table + 4 * tensor + 2), tl.load(table + 4 * tensor + 3)
    where = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = block.to(tl.int64) * BLOCK - start
    lane = tl.arange(0, BLOCK)
    value, speed = tl.load(p + where), tl.load(momentum + where)
    slow = value
    if TEACHER:
        slow = tl.load(teacher + where, tl.full([BLOCK], 1, tl.int1) & (block < taught), 0.0)
    if kind != 0:
        g = tl.zeros([BLOCK], tl.float32)
        # whole loads of 16 bytes, because those are aligned; elements beyond the gradient become zero below
        if kind == 1:
            full = tl.multiple_of((address + 4 * first).to(tl.pointer_type(tl.float32)), 16)
            g = tl.load(full + lane, lane < tl.multiple_of((size - first + 3) // 4 * 4, 4), 0.0)
        else:
            short = tl.multiple_of((address + 2 * first).to(tl.pointer_type(half.dtype.element_ty)), 16)
            g = tl.load(short + lane, lane < tl.multiple_of((size - first + 7) // 8 * 8, 8), 0.0).to(tl.float32)
        g = tl.where(lane < size - first, g, 0.0)
        if CLIP:
            g *= tl.load(factor)
        g += tl.load(decay + tensor) * value
        speed = mu * speed + g
        tl.store(momentum + where, speed)
        value -= tl.load(lr) * speed
        tl.store(p + where, value)
    if COPY:
        tl.store(half + where, value.to(half.dtype.element_ty))
    if TEACHER:  # noqa: SIM102  (a constant; the inner value is on the device)
        if block < taught:
            slow += tl.load(share) * (value - slow)
            tl.store(teacher + where, slow)
            if COPY:
                tl.store(teacher_half + where, slow.to(half.dtype.element_ty))


class Flat:
    """A method's parameters in flat buffers, and the step that updates them.

    `names` are the parameters that learn, in the order of `method.named_parameters()`. `step` takes their gradients in
    this order. `half` maps the name of every parameter, the teacher's too, to its half-precision copy, except for batch
    norms. It is empty if `precision` is float32.

    Once built, the method must not move to another device or memory format. Call `refresh` after loading a checkpoint.
    """

    def __init__(self, method: nn.Module, optimizer: torch.optim.SGD, precision: torch.dtype) -> None:
        every = dict(method.named_parameters())
        self.names = [name for name, p in every.items() if p.requires_grad]
        self.copied: list[str] = []
        """Parameters whose gradients are copied at each step, because of another memory layout or an odd size."""
        learning = {name: every[name] for name in self.names}
        self._mu = _momentum(optimizer, learning)
        taught = _taught(every, learning)
        order = [*taught, *(name for name in self.names if name not in taught)]
        self._starts, end, self._taught = {}, 0, 0
        owner: list[int] = []
        for name in order:
            self._starts[name] = end
            blocks = triton.cdiv(every[name].numel(), BLOCK)
            owner += [self.names.index(name)] * blocks
            end += blocks * BLOCK
            self._taught += blocks if name in taught else 0
        device = every[order[0]].device
        self._parameters, self._momenta = (torch.zeros(end, device=device) for _ in range(2))
        self._teacher = torch.zeros(max(self._taught * BLOCK, 1), device=device)
        self._learning = learning
        self._move(every, taught, optimizer)
        self._owner = torch.tensor(owner, dtype=torch.int32, device=device)
        decay = {id(p): float(group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
        self._decay = torch.tensor([decay[id(p)] for p in learning.values()], dtype=torch.float32, device=device)
        self._copy = precision != torch.float32
        self._halves = [
            torch.zeros(len(flat) if self._copy else 1, dtype=precision, device=device)
            for flat in (self._parameters, self._teacher)
        ]
        self.half = dict(self._windows(method, taught)) if self._copy else {}
        self._rows: list[list[int]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._scratch: dict[str, Tensor] = {}
        self._table = torch.zeros(len(self.names), 4, dtype=torch.int64, device=device)
        self.refresh()

    @torch.no_grad()
    def _move(self, every: Mapping[str, Tensor], taught: dict[str, str], optimizer: torch.optim.SGD) -> None:
        for name, p in self._learning.items():
            _check(name, p)
            moved: list[tuple[Tensor, Tensor]] = [(self._parameters, p)]
            held = optimizer.state[p]
            if held.get("momentum_buffer") is None:
                held["momentum_buffer"] = torch.zeros_like(p)
            if held["momentum_buffer"].stride() != p.stride():
                held["momentum_buffer"] = torch.empty_like(p).copy_(held["momentum_buffer"])
            moved.append((self._momenta, held["momentum_buffer"]))
            if name in taught:
                slow = every[taught[name]]
                if slow.stride() != p.stride() or slow.shape != p.shape:
                    raise ValueError(f"{taught[name]} does not lie in memory as {name} does; make it by teacher_of")
                moved.append((self._teacher, slow))
            for flat, tensor in moved:
                window = _window(flat, self._starts[name], tensor)
                window.copy_(tensor)
                tensor.data = window

    def _windows(self, method: nn.Module, taught: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
        norms = {id(p) for module in method.modules() if isinstance(module, _BatchNorm) for p in module.parameters()}
        back = {slow: fast for fast, slow in taught.items()}
        for name, p in method.named_parameters():
            if id(p) not in norms and (name in self._learning or name in back):
                flat = self._halves[1 if name in back else 0]
                yield name, _window(flat, self._starts[back.get(name, name)], p)

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the half-precision copies again, after anything but `step` has changed parameters."""
        if self._copy:
            self._halves[0].copy_(self._parameters)
            self._halves[1].copy_(self._teacher)

    def bind(self, grads: Sequence[Tensor | None] | None = None) -> None:
        """Tell the device where the gradients are. None means where they were at the last `step`.

        A CUDA graph reads gradients from the last bound addresses. Gradients made during a capture exist only in the
        graph, and nothing can be bound during the capture. So call `bind()` after it, before the first replay.
        """
        if grads is not None:
            self._look(grads)
        self._table.copy_(torch.tensor(self._rows, dtype=torch.int64))

    def step(
        self, lr: Tensor, share: Tensor, grads: Sequence[Tensor | None] | None = None, factor: Tensor | None = None
    ) -> None:
        """Do SGD with learning rate `lr`, the EMA with momentum 1 - `share`, and the copies, in one launch.

        `lr`, `share` and `factor`, which multiplies every gradient, are 0-d float32 tensors on the device. The EMA
        takes `share` rather than its momentum, because float32 loses the small distance from 1: 1e-5 would be off by a
        thousandth.

        Without `grads`, the bound gradients are read again. A gradient of None leaves its parameter unchanged, as in
        torch.
        """
        for what, x in (("lr", lr), ("share", share), ("factor", factor)):
            if x is not None and (x.dim() != 0 or x.dtype != torch.float32 or x.device != self._table.device):
                raise ValueError(f"{what} is {x.dtype} of shape {tuple(x.shape)} on {x.device}; it must be 0-d float32")
        if grads is not None:
            known = self._rows
            self._look(grads)
            capturing = self._table.is_cuda and torch.cuda.is_current_stream_capturing()
            if self._rows != known and not capturing:
                self.bind()
        if not self._rows:
            raise ValueError("step has no gradients; give them, or bind them before")
        for scratch, g in self._copies:
            scratch.copy_(g)
        _sgd_ema[(len(self._owner),)](
            self._parameters, self._momenta, self._halves[0], self._teacher, self._halves[1], self._owner, self._table,
            self._decay, lr, share, lr if factor is None else factor, self._mu, self._taught,
            TEACHER=self._taught > 0, COPY=self._copy, CLIP=factor is not None, BLOCK=BLOCK, num_warps=_WARPS,
        )  # fmt: skip

    def _look(self, grads: Sequence[Tensor | None]) -> None:
        """Write the table's rows for these gradients.

        Copy a gradient to scratch memory if it cannot be read in place.
        """
        if len(grads) != len(self.names):
            raise ValueError(f"there are {len(grads)} gradients for {len(self.names)} parameters")
        self._rows, self._copies, self.copied = [], [], []
        for (name, p), g in zip(self._learning.items(), grads, strict=True):
            address, kind = 0, _NONE
            if g is not None:
                if g.shape != p.shape or g.dtype not in (torch.float32, self._halves[0].dtype) or g.device != p.device:
                    raise ValueError(f"the gradient of {name} is {g.dtype} of shape {tuple(g.shape)} on {g.device}")
                if _strides(g) != _strides(p) or g.data_ptr() % 16 or g.numel() % _LANE:
                    held = self._scratch.get(name)
                    if held is None or held.dtype != g.dtype:
                        whole = triton.cdiv(p.numel(), _LANE) * _LANE
                        held = _window(torch.zeros(whole, dtype=g.dtype, device=p.device), 0, p)
                        self._scratch[name] = held
                    self._copies.append((held, g.detach()))
                    self.copied.append(name)
                    g = held
                address, kind = g.data_ptr(), _FULL if g.dtype == torch.float32 else _HALF
            self._rows.append([address, self._starts[name], p.numel(), kind])


def _momentum(optimizer: torch.optim.SGD, learning: Mapping[str, Tensor]) -> float:
    """Return SGD's momentum. Raise if the kernel does not do this kind of SGD."""
    asked = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if asked != {id(p) for p in learning.values()}:
        raise ValueError("the optimizer's parameters are not those of the method that learn")
    for group in optimizer.param_groups:
        if group["nesterov"] or group["maximize"] or group["dampening"]:
            raise ValueError("the flat step is SGD without nesterov, maximize and dampening; use torch.optim.SGD.step")
    found = {float(group["momentum"]) for group in optimizer.param_groups}
    if len(found) != 1:
        raise ValueError(f"the optimizer's groups have momenta {sorted(found)}; the flat step takes one")
    return found.pop()


def _taught(every: Mapping[str, Tensor], learning: Mapping[str, Tensor]) -> dict[str, str]:
    """Map the name of each parameter that has a counterpart in the teacher to the counterpart's name."""
    found = {f"student.{name.removeprefix(_TEACHER)}": name for name in every if name.startswith(_TEACHER)}
    if odd := sorted(fast for fast in found if fast not in learning):
        raise ValueError(f"the teacher has a counterpart of {odd[0]}, which does not learn ({len(odd)} names in all)")
    return found


def _check(name: str, p: Tensor) -> None:
    dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
    if p.dtype != torch.float32 or not dense:
        raise ValueError(f"{name} is {p.dtype} with strides {p.stride()}; it must be float32 without gaps")


def _window(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a tensor in the memory of `flat`, with the shape and strides of `like`. Autograd does not see a view."""
    return flat.new_empty(0).set_(flat.untyped_storage(), start, like.shape, like.stride())


def _strides(x: Tensor) -> list[int]:
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
