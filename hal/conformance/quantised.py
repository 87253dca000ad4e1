"""What an element of a quantised cache must be, from the value table of its dtype rather than from a conversion routine."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["QMAX", "decode_codes", "nearest_codes", "rounding_error"]

#: qmax of each dtype of quantised caches: what an amax scale maps the largest magnitude to. int8 itself reaches to -128.
QMAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}


@cache
def _table(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Finite values of the dtype, ascending, and the bit pattern of each (+0 for zero)."""
    if dtype == torch.int8:
        codes = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).view(torch.uint8)
    else:
        codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        codes = codes[codes != 0x80]
    values = decode_codes(codes, dtype)
    finite = values.isfinite()
    values, order = values[finite].sort()
    return values, codes[finite][order]


def decode_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the float64 values of bit patterns (uint8), by the definition of the format."""
    bits = codes.to(torch.int64)
    if dtype == torch.int8:
        return torch.where(bits > 127, bits - 256, bits).double()
    mantissa_bits, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    sign = torch.where(bits >= 128, -1.0, 1.0).double()
    exponent = (bits & 127) >> mantissa_bits
    fraction = (bits & (2**mantissa_bits - 1)).double() / 2**mantissa_bits
    normal = (1 + fraction) * torch.pow(torch.tensor(2.0, dtype=torch.float64), exponent - bias)
    value = sign * torch.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)
    if dtype == torch.float8_e4m3fn:
        return torch.where(bits & 127 == 127, torch.nan, value)
    special = torch.where(fraction > 0, torch.nan, sign * torch.inf)
    return torch.where(exponent == 31, special, value)


def nearest_codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bit patterns (uint8) of `x` rounded half to even and saturated; NaN becomes int8 0."""
    values, codes = _table(dtype)
    x = x.detach().double().cpu()
    finite = x.nan_to_num(nan=0.0).clamp(float(values[0]), float(values[-1]))
    upper = torch.searchsorted(values, finite).clamp(0, len(values) - 1)
    lower = (upper - 1).clamp_min(0)
    below, above = finite - values[lower], values[upper] - finite
    even = codes[upper] % 2 == 0
    pick = torch.where((above < below) | ((above == below) & even), upper, lower)
    result = codes[pick]
    if dtype == torch.int8:
        return result
    negative_zero = (result == 0) & torch.signbit(x)
    result = torch.where(negative_zero, torch.full_like(result, 0x80), result)
    return torch.where(x.isnan(), torch.full_like(result, 0x7F), result)


def rounding_error(x: Tensor, stored: Tensor) -> float:
    """Return how far `stored` (a cache tensor) is from the nearest choice for float64 `x`, in units of half a spacing: 1 or less is right."""
    values, _ = _table(stored.dtype)
    got = decode_codes(stored.detach().cpu().contiguous().view(torch.uint8), stored.dtype)
    if bool(got.isnan().any()):
        return float("inf")
    x = x.double().cpu().clamp(float(values[0]), float(values[-1]))
    upper = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    spacing = values[upper] - values[upper - 1]
    return float(((got - x).abs() / (spacing / 2)).max()) if x.numel() else 0.0
