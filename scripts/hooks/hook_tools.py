"""What check_hooks.py and prove_hooks.py share."""

import functools


def around(owner, name, before=None, after=None):
    """Patch a function: call `before`, the function, and after(result, what `before` returned)."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        found = before(*args, **kwargs) if before else None
        result = original(*args, **kwargs)
        if after:
            after(result, found, *args, **kwargs)
        return result

    patched.original = original
    setattr(owner, name, patched)


def leave_out_dropout(torch, drew=None, leave_out=True):
    """Turn dropout off, because ranks draw different masks; call drew(input) for each mask."""
    functional = torch.nn.functional

    def without(name, by_default):
        original = getattr(functional, name)

        # torch.compile needs the name of the function.
        @functools.wraps(original)
        def call(x, p=0.5, training=by_default, inplace=False):
            if training and p and drew:
                drew(x)
            return original(x, p, training and not leave_out, inplace)

        setattr(functional, name, call)

    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
        without(name, True)
    without("alpha_dropout", False)
    attention = functional.scaled_dot_product_attention

    @functools.wraps(attention)
    def attend(query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        if dropout_p and drew:
            drew(query)
        p = 0.0 if leave_out else dropout_p
        return attention(query, key, value, attn_mask, p, *args, **kwargs)

    functional.scaled_dot_product_attention = attend


def split_batch_norm(torch):
    """Let BatchNorm normalise each sample by itself, because each rank has its own batch."""
    functional = torch.nn.functional
    of_batch = functional.batch_norm

    @functools.wraps(of_batch)
    def of_sample(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        if not training:
            return of_batch(x, mean, var, weight, bias, training, momentum, eps)
        return normalise(x, weight, bias, eps)

    functional.batch_norm = of_sample


def normalise_each_sample(batch_norm, x):
    """Replaces the forward of a BatchNorm module."""
    return normalise(x, batch_norm.weight, batch_norm.bias, batch_norm.eps)


def normalise(x, weight, bias, eps):
    """Normalise by the mean and the variance over all channels of each sample."""
    from torch.nn import functional

    # With Apex, weights and activations may have different types here.
    values = x if weight is None else x.to(weight.dtype)
    return functional.group_norm(values, 1, weight, bias, eps).to(x.dtype)


def is_tensor(value):
    return hasattr(value, "data_ptr")


def leaves(value, name=""):
    """Yield (name, tensor or other value) of nested dicts, lists and tuples."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        yield from leaves(part, f"{name}.{key}" if name else str(key))


def local(tensor):
    """This rank's part of a tensor, dense."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return tensor.to_dense() if tensor.is_sparse else tensor


def checksum(value):
    import zlib

    import torch

    if not is_tensor(value):
        return zlib.crc32(repr(value).encode())
    # A meta tensor has no values.
    if value.device.type == "meta":
        return 0
    data = local(value).detach().cpu().contiguous().flatten()
    return zlib.crc32(data.view(torch.uint8).numpy()) if data.numel() else 0
