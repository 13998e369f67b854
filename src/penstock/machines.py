"""Machines described by their data sheets, for making plans when the machine itself is not available.

Rates are those of the data sheets. Next to them are the shares that programs reach, which are our assumptions:
``matmul_share`` and ``memory_share`` of operators, ``link_share`` of links. Measured rates of a link have a share of 1.
A modeled time is no measurement: it has no launches of kernels, no caches and no noise.
"""

from dataclasses import dataclass
from typing import Any

import torch

from penstock.arguments import check_fields, checked

_LAUNCH_S = 5e-6
"""Least seconds that starting an operator takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device with its link to host memory, and a disk. It is wide because data sheets have that many figures."""

    name: str
    """Name to ask for it by, such as ``"h200"``."""
    title: str
    """Description of the machine."""
    half_flops: float
    """Floating-point operations per second of matrix products in bfloat16 and float16, without sparsity."""
    single_flops: float
    """Floating-point operations per second of matrix products in float32."""
    memory_bytes: int
    """Bytes of the device's memory."""
    memory_bytes_per_s: float
    """Bytes per second that the device's memory carries."""
    out_bytes_per_s: float
    """Bytes per second from the device to host memory."""
    in_bytes_per_s: float
    """Bytes per second from host memory to the device."""
    write_bytes_per_s: float
    """Bytes per second to the disk."""
    read_bytes_per_s: float
    """Bytes per second from the disk."""
    sources: tuple[str, ...]
    """Sources of these figures."""
    matmul_share: float = 0.6
    """Share of ``half_flops`` and ``single_flops`` that matrix products of some size reach."""
    memory_share: float = 0.8
    """Share of ``memory_bytes_per_s`` that all other operators reach."""
    link_share: float = 0.8
    """Share of the link's and the disk's rates that copies reach."""

    def __post_init__(self) -> None:
        check_fields(
            self, "penstock.machines.MACHINES['h200']",
            half_flops=1, single_flops=1, memory_bytes=1, memory_bytes_per_s=1, out_bytes_per_s=1, in_bytes_per_s=1,
            write_bytes_per_s=1, read_bytes_per_s=1, matmul_share=0, memory_share=0, link_share=0,
        )  # fmt: skip

    @checked("machine.operator_s(flops=1e12, size_bytes=2**30, dtype=torch.bfloat16)", flops=0, size_bytes=0)
    def operator_s(self, *, flops: float, size_bytes: float, dtype: torch.dtype) -> float:
        """Return an operator's seconds: the longer of its arithmetic and of reading and writing its bytes."""
        peak = self.half_flops if dtype in (torch.bfloat16, torch.float16) else self.single_flops
        return max(
            _LAUNCH_S, flops / (self.matmul_share * peak), size_bytes / (self.memory_share * self.memory_bytes_per_s)
        )

    @checked("machine.lane_rates(to_disk=True)")
    def lane_rates(self, *, to_disk: bool) -> tuple[float, float]:
        """Return bytes per second out of the device and into it, for host memory or for a disk behind it."""
        out, back = self.out_bytes_per_s, self.in_bytes_per_s
        if to_disk:
            out, back = min(out, self.write_bytes_per_s), min(back, self.read_bytes_per_s)
        return self.link_share * out, self.link_share * back


_PM9A3 = "Samsung PM9A3 3.84 TB, product brief: sequential read 6,800 MB/s, write 4,000 MB/s"
_PCIE_4 = "PCI Express Base Specification 4.0: 16 lanes, 31.5 GB/s each way"
_PCIE_5 = "PCI Express Base Specification 5.0: 16 lanes, 63 GB/s each way"

MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            name="h200",
            title="NVIDIA H200 SXM, PCIe 5.0",
            half_flops=989e12,
            single_flops=67e12,
            memory_bytes=141 * 10**9,
            memory_bytes_per_s=4.8e12,
            out_bytes_per_s=63e9,
            in_bytes_per_s=63e9,
            write_bytes_per_s=4.0e9,
            read_bytes_per_s=6.8e9,
            sources=(
                "NVIDIA H200 Tensor Core GPU data sheet (2024): bfloat16 1,979 TFLOPS with sparsity, float32 67, "
                "141 GB, 4.8 TB/s",
                _PCIE_5,
                _PM9A3,
            ),
        ),
        Machine(
            name="a100",
            title="NVIDIA A100 80 GB SXM, PCIe 4.0",
            half_flops=312e12,
            single_flops=19.5e12,
            memory_bytes=80 * 10**9,
            memory_bytes_per_s=2.039e12,
            out_bytes_per_s=31.5e9,
            in_bytes_per_s=31.5e9,
            write_bytes_per_s=4.0e9,
            read_bytes_per_s=6.8e9,
            sources=(
                "NVIDIA A100 Tensor Core GPU data sheet (2021): bfloat16 312 TFLOPS, float32 19.5, 80 GB, 2,039 GB/s",
                _PCIE_4,
                _PM9A3,
            ),
        ),
        Machine(
            name="a100-40gb-optane",
            title="NVIDIA A100 40 GB PCIe with four Optane SSDs in RAID 0, as SSDTrain's",
            half_flops=312e12,
            single_flops=19.5e12,
            memory_bytes=40 * 10**9,
            memory_bytes_per_s=1.555e12,
            out_bytes_per_s=31.5e9,
            in_bytes_per_s=31.5e9,
            write_bytes_per_s=24.4e9,
            read_bytes_per_s=28.8e9,
            sources=(
                "NVIDIA A100 Tensor Core GPU data sheet (2020): bfloat16 312 TFLOPS, float32 19.5, 40 GB, 1,555 GB/s",
                _PCIE_4,
                "Intel Optane SSD DC P5800X product brief: sequential read 7.2 GB/s, write 6.1 GB/s; four of them, our "
                "assumption of the RAID's size",
            ),
        ),
        Machine(
            name="rtx4090",
            title="NVIDIA GeForce RTX 4090, PCIe 4.0",
            half_flops=165.2e12,
            single_flops=82.6e12,
            memory_bytes=24 * 2**30,
            memory_bytes_per_s=1.008e12,
            out_bytes_per_s=31.5e9,
            in_bytes_per_s=31.5e9,
            write_bytes_per_s=6.9e9,
            read_bytes_per_s=7.45e9,
            sources=(
                "NVIDIA Ada GPU architecture white paper (2022): float16 with float32 sums 165.2 TFLOPS without "
                "sparsity, float32 82.6, 24 GB, 1,008 GB/s",
                _PCIE_4,
                "Samsung 990 PRO 2 TB data sheet: sequential read 7,450 MB/s, write 6,900 MB/s",
            ),
        ),
        Machine(
            name="gh200",
            title="NVIDIA GH200, NVLink-C2C",
            half_flops=989e12,
            single_flops=67e12,
            memory_bytes=96 * 10**9,
            memory_bytes_per_s=4.0e12,
            out_bytes_per_s=170e9,
            in_bytes_per_s=411e9,
            write_bytes_per_s=4.0e9,
            read_bytes_per_s=6.8e9,
            sources=(
                "NVIDIA GH200 Grace Hopper Superchip data sheet (2023): bfloat16 990 TFLOPS without sparsity, "
                "float32 67, 96 GB, 4 TB/s",
                "Measured over NVLink-C2C: 411 GB/s in, 170 out (github.com/NVIDIA/Megatron-LM issue 6491)",
                _PM9A3,
            ),
            link_share=1.0,
        ),
    )
}
"""Machines by name."""


def counted_flops(function: Any, arguments: Any, keywords: Any, result: Any) -> float:  # any: an operator's own
    """Return the floating-point operations of one call of a PyTorch operator; 0 if PyTorch does not count them."""
    from torch.utils.flop_counter import flop_registry  # imports Triton

    packet = getattr(function, "overloadpacket", None)
    return float(flop_registry[packet](*arguments, **keywords, out_val=result)) if packet in flop_registry else 0.0


@checked("penstock.machines.machine_named('h200')")
def machine_named(name: str) -> Machine:
    """Return the machine of that name. Raises ``ValueError``, which lists those that are described, for another."""
    if name not in MACHINES:
        raise ValueError(f"unknown machine {name!r}; the known machines are {', '.join(MACHINES)}")
    return MACHINES[name]
