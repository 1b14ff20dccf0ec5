"""Operations on images whose implementation depends on the device: the input of a torso, patches and LayerNorm.

Shapes: B images, C channels, H and W pixels, s stride, h = H/s, w = W/s.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from qfleet.accel.kernels.kernel_compiler import compile_kernel, custom_kernels_allowed

WORDS = {4: torch.int32, 8: torch.int64}


def image_input(x: torch.Tensor, dtype: torch.dtype, divisor: float, reads_bytes: bool = False) -> torch.Tensor:
    """Images as a torso reads them: divided by `divisor`, and on a GPU channels-last.

    On a GPU a torso that `reads_bytes` gets them unchanged, since it can form patches of a quarter of the size.
    """
    if reads_bytes and x.is_cuda:
        return x
    pixels = x.to(dtype)
    if divisor != 1:
        pixels = pixels * (1 / divisor) if pixels is x else pixels.mul_(1 / divisor)
    return pixels.contiguous(memory_format=torch.channels_last) if x.is_cuda else pixels


def symbol_planes(x: torch.Tensor, symbols: int, dtype: torch.dtype) -> torch.Tensor:
    """One-hot planes [B, C · symbols, H, W] of images [B, C, H, W] of symbols; higher ones count as the last."""
    values = torch.arange(symbols, dtype=x.dtype, device=x.device)[:, None, None]
    planes = (x.clamp(max=symbols - 1).unsqueeze(2) == values).flatten(1, 2).to(dtype)
    return planes.contiguous(memory_format=torch.channels_last) if x.is_cuda else planes


def bytes_to_patches(x: torch.Tensor, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """`space_to_depth` in another dtype; to bfloat16 on a GPU by one kernel, if the stride is 4."""
    items, channels, high, wide = x.shape
    fits = stride == 4 and high % 4 == wide % 4 == 0 and dtype == torch.bfloat16
    if x.is_cuda and fits and custom_kernels_allowed() and (kernel := compile_kernel("lay")) is not None:
        patches = torch.empty(items, high // 4, wide // 4, channels * 16, dtype=torch.bfloat16, device=x.device)
        kernel(x.numel() // 16, [x.contiguous(), patches, x.numel() // 16, channels, high, wide])
        return patches.permute(0, 3, 1, 2)
    return space_to_depth(x, stride).to(dtype)


def space_to_depth(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Bytes [B, C, H, W] -> [B, C · s · s, h, w], channels last. Pixels beyond the last full patch are ignored."""
    items, channels, high, wide = (x.shape[0], x.shape[1], x.shape[2] // stride, x.shape[3] // stride)
    x = x[..., :high * stride, :wide * stride].contiguous()
    pixels = x.view(items, channels, high, stride, wide, stride)
    if torch.compiler.is_compiling():  # the compiler fuses the copy, and cannot view bytes as words
        patches = pixels.permute(0, 2, 4, 1, 3, 5)
    else:  # the pixels of a patch row are contiguous and move as one 4- or 8-byte word
        patches = pixels.view(WORDS[stride])[..., 0].permute(0, 2, 4, 1, 3).contiguous().view(torch.uint8)
    return patches.reshape(items, high, wide, channels * stride * stride).permute(0, 3, 1, 2)


def image_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise images [B, C, H, W] over all channels and pixels, with one weight per channel.

    On a GPU images are channels-last. The GroupNorm kernel would convert them to channels-first and the next
    convolution back, so LayerNorm's kernel is used there.
    """
    if x.is_cuda:
        return channels_last_layer_norm(x, weight, bias, eps)
    return F.group_norm(x, 1, weight, bias, eps)


def channels_last_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise images [B, C, H, W] as rows of H·W·C floats; the result is channels-last."""
    images = x.permute(0, 2, 3, 1)
    shape = images.shape[1:]
    return F.layer_norm(images, shape, weight.expand(shape), bias.expand(shape), eps).permute(0, 3, 1, 2)
