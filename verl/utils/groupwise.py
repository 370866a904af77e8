"""Statistics of the samples of each prompt."""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.utils import envs

Device = torch.device | str | None


def _pick_device(device: Device, default: torch.device | str = "cpu") -> torch.device:
    """Return the given device, else the one of ``VERL_FORCE_DEVICE``, else the default."""
    return torch.device(device or envs.read("VERL_FORCE_DEVICE") or default)


def _whole_if_near(labels: np.ndarray) -> np.ndarray:
    """Round floats that are all integers up to rounding errors, so that 3 and 2.9999999 are one label."""
    whole = np.round(labels)
    return whole if np.all(np.abs(labels - whole) <= 1e-6 + np.spacing(np.abs(labels))) else labels


def as_torch_index(index: Sequence[Hashable] | np.ndarray | Tensor, device: Device = None) -> Tensor:
    """Number hashable group labels: return a (B,) LongTensor with values 0..G-1.

    Floats that are all within a rounding error of an integer count as these integers.

    Raises: ValueError when the labels are not one-dimensional.
    """
    if isinstance(index, Tensor | np.ndarray) and index.ndim != 1:
        raise ValueError(f"group index must have shape (B,), got {tuple(index.shape)}")
    if isinstance(index, Tensor) and not index.is_floating_point():
        codes: Tensor = torch.unique(index.to(_pick_device(device, index.device)), return_inverse=True)[1]
        return codes.long()
    default_device: Device = None
    if isinstance(index, Tensor):
        default_device = index.device
        index = index.detach().cpu().double().numpy() if index.dtype != torch.float32 else index.detach().cpu().numpy()
    if isinstance(index, np.ndarray) and index.dtype != object:
        labels_np = _whole_if_near(index) if np.issubdtype(index.dtype, np.floating) else index
        codes_np = np.unique(labels_np, return_inverse=True)[1]
    else:
        # Labels of mixed types have no order, and sorting strings takes longer than the rest of an estimator.
        labels = index.tolist() if isinstance(index, np.ndarray) else list(index)
        if set(map(type, labels)) in ({float}, {float, int}):
            labels = _whole_if_near(np.asarray(labels, dtype=np.float64)).tolist()
        try:
            number = {label: i for i, label in enumerate(dict.fromkeys(labels))}
            codes_np = np.fromiter(map(number.__getitem__, labels), dtype=np.int64, count=len(labels))
        except TypeError as error:
            raise ValueError(f"group index must hold one hashable label per row, shape (B,): {error}") from error
    return torch.as_tensor(codes_np, dtype=torch.long, device=_pick_device(device, default_device or "cpu"))


def group_sum(values: Tensor, group: Tensor, num_groups: int) -> Tensor:
    """Sum (B,) values by group in float64: (G,)."""
    total = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
    return total.index_add_(0, group, values.double())


def group_count(group: Tensor) -> Tensor:
    """Return the size of each group: (G,) int64."""
    return torch.bincount(group)


def group_mean_std(
    scores: Tensor, gidx: Tensor, eps: float = 1e-6, device: Device = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, unbiased standard deviation and size of each group.

    The variance has a floor of ``eps``. A group of one has mean 0 and deviation 1, so that normalising does not change
    its score. Sums are in float64, because the rounding of fp32 would give equal scores a deviation above zero.

    Args: scores (B,), gidx (B,) with values 0..G-1.
    Returns: (mean, std, count), each (G,) in the dtype of the scores.
    Raises: ValueError when the inputs disagree on B.
    """
    target = _pick_device(device, scores.device)
    scores = scores.reshape(-1).to(target)
    gidx = gidx.reshape(-1).to(target)
    if scores.numel() != gidx.numel():
        raise ValueError(f"{scores.numel()} scores cannot be grouped by {gidx.numel()} indices")
    dtype = scores.dtype if scores.dtype.is_floating_point else torch.float32
    size = group_count(gidx)
    count = size.double()
    mean = group_sum(scores, gidx, len(size)) / count.clamp(min=1)
    squares = group_sum((scores.double() - mean[gidx]) ** 2, gidx, len(size))
    std = (squares / (count - 1).clamp(min=1)).clamp(min=eps).sqrt()
    single = size <= 1
    mean = mean.masked_fill(single, 0.0)
    std = std.masked_fill(single, 1.0)
    return mean.to(dtype), std.to(dtype), count.to(dtype)
