"""GPU memory outside of a run's tensors. It is shown separately from the peak, which counts tensors.

Nothing here is measured. Defaults of libraries cite their source; the other values are marked as assumptions.
"""

from collections.abc import Mapping

_MIB = 1 << 20

_CONTEXT_BYTES = 512 * _MIB  # an assumption: kernels and local memory of a process
# c10/cuda/CUDABlas.cpp, the default of CUBLAS_WORKSPACE_CONFIG on Hopper; about 8 MiB on other GPUs. torch's allocator
# provides it, so torch.cuda.max_memory_allocated includes it. Each thread has its own: the forward pass's and
# autograd's left exactly 64 MiB on an H200.
CUBLAS_WORKSPACE_BYTES = 2 * 32 * _MIB
_NCCL_CHANNEL_BYTES = 4 * _MIB  # the default of NCCL_BUFFSIZE
_NCCL_CHANNELS = 32  # an assumption: the most that NCCL uses by default
# c10/cuda/CUDACachingAllocator.cpp: blocks are multiples of 512 B, segments of large blocks of 2 MiB.
_BLOCK_BYTES, _SEGMENT_BYTES = 512, 2 * _MIB
_SLACK = 20  # an assumption: a twentieth of the peak is in fragments too small for any tensor


def device_overhead(peak_bytes: int, num_tensors: int, num_groups: int) -> Mapping[str, int]:
    """Bytes of GPU memory outside of tensors, by term.

    Args:
        peak_bytes: The peak of tensors.
        num_tensors: Number of tensors that exist for the whole run.
        num_groups: Number of process groups with more than one rank.
    """
    return {
        "CUDA context": _CONTEXT_BYTES,
        "NCCL buffers": num_groups * _NCCL_CHANNELS * _NCCL_CHANNEL_BYTES,
        # Beyond the bytes of tensors: rounding, and partly used segments.
        "allocator": num_tensors * _BLOCK_BYTES + _SEGMENT_BYTES + peak_bytes // _SLACK,
    }
